from epdserve.model.demo.corpus import lines, names


def test_same_seed_gives_the_same_text() -> None:
    assert list(lines(3, 50)) == list(lines(3, 50))
    assert list(lines(3, 50)) != list(lines(4, 50))


def test_text_is_plain_ascii() -> None:
    assert "".join(lines(0, 200)).isascii()


def test_names_are_distinct() -> None:
    assert len(names()) == len(set(names())) > 300
