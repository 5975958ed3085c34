"""The rules of fetching, a row each; a small server on loopback stands for the world where bytes are needed."""

import asyncio
import re
import ssl
import subprocess
from pathlib import Path

import pytest
from epdserve.services.errors import InvalidRequest, PayloadTooLarge
from epdserve.services.router.images.addresses import is_public
from epdserve.services.router.images.budget import BytesLeft
from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.images.fetcher import ImageFetcher
from epdserve.services.router.images.urls import AllowList, parse_target, read_data_url
from support.repository import ROOT
from support.web import Answer, says, world


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.1.2.3",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::1",
        "2002:a00:1::1",
        "localhost",
        "",
        "not an address",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_pass(address: str) -> None:
    assert is_public(address)


ALLOWED = AllowList(["img.example.com", "*.cdn.example.net", "odd.example.org:8443", "[2606:4700::1111]"])


@pytest.mark.parametrize(
    "url",
    [
        "https://img.example.com/a.png",
        "https://" + "IMG.example.com./a.png?x=1#part",
        "https://img.example.com:443/",
        "https://a.cdn.example.net/x",
        "https://a.b.cdn.example.net/x",
        "https://odd.example.org:8443/x",
        "https://[2606:4700::1111]/x",
    ],
)
def test_allowed_urls(url: str) -> None:
    assert parse_target(url, ALLOWED, allow_http=False, max_chars=8192).scheme == "https"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://img.example.com/a.png", "not fetched by"),
        ("file:///etc/passwd", "not fetched by"),
        ("ftp://img.example.com/a", "not fetched by"),
        ("gopher://img.example.com/a", "not fetched by"),
        ("//img.example.com/a", "not fetched by"),
        ("img.example.com/a.png", "not fetched by"),
        ("", "not fetched by"),
        ("https://other.example.com/a.png", "does not fetch"),
        ("https://example.com/", "does not fetch"),
        ("https://cdn.example.net/", "does not fetch"),
        ("https://evilcdn.example.net/", "does not fetch"),
        ("https://" + "img.example.com.evil.example.org/", "does not fetch"),
        ("https://img.example.com:22/", "does not fetch"),
        ("https://odd.example.org/", "does not fetch"),
        ("https://127.0.0.1/", "does not fetch"),
        ("https://[::1]/", "does not fetch"),
        ("https://" + "2130706433/", "does not fetch"),
        ("https:///a", "does not fetch"),
        ("https://" + "user:secret@img.example.com/", "credentials"),
        ("https://" + "user@img.example.com/", "credentials"),
        ("https://" + "img.example.com@evil.example.org/", "credentials"),
        ("https://" + "img.example.com\\@evil.example.org/", "escaped"),
        ("https://img.example.com/a b", "escaped"),
        ("https://img.example.com/\r\nHost: x", "escaped"),
        ("https://\u0456mg.example.com/", "escaped"),
        ("https://img.example.com:99999/", "malformed"),
        ("https://[::1/", "malformed"),
        ("https://img.example.com/" + "a" * 8192, "characters"),
    ],
)
def test_refused_urls(url: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        parse_target(url, ALLOWED, allow_http=False, max_chars=8192)


@pytest.mark.parametrize("entry", ["", "*", "*.", "a*b.org", "https://" + "a.org", "u@a.org"])
def test_an_allow_list_holds_hosts_only(entry: str) -> None:
    with pytest.raises(ValueError, match="no host"):
        AllowList([entry])


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,AAEC", b"\0\1\2"),
        ("DATA:;BASE64,AAEC", b"\0\1\2"),
        ("data:image/png;base64,AAE", b"\0\1"),
        ("data:image/png;base64,AA%2FC", b"\x00\x0f\xc2"),
        ("data:image/png;base64,-_8=", b"\xfb\xff"),
        ("data:text/plain;charset=utf-8,a%20b", b"a b"),
    ],
)
def test_data_urls(url: str, data: bytes) -> None:
    assert read_data_url(url, max_bytes=100) == data


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64", "data:image/png;base64,", "data:;base64,A", "data:;base64,%%%", "png,AAAA"],
)
def test_broken_data_urls(url: str) -> None:
    with pytest.raises(InvalidRequest):
        read_data_url(url, max_bytes=100)


@pytest.mark.parametrize("url", ["data:;base64," + "AAAA" * 100, "data:," + "x" * 101])
def test_data_urls_are_limited(url: str) -> None:
    with pytest.raises(PayloadTooLarge):
        read_data_url(url, max_bytes=100)


# -- bytes ------------------------------------------------------------------------------------------------------


def left(nbytes: int = 10**9) -> BytesLeft:
    return BytesLeft(nbytes)


class Names:
    """A resolver that counts, and may change its mind."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.asked = list(answers), []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def fetcher(
    port: int, names: Names | None = None, *, tls: ssl.SSLContext | None = None, **settings: object
) -> ImageFetcher:
    values = {
        "allowed_hosts": (f"pics.example:{port}", f"more.example:{port}"),
        "allow_http": True,
        **settings,
    }
    return ImageFetcher(
        ImageSettings.model_validate(values),
        resolve=names or Names(["127.0.0.1"]),
        reachable=lambda address: address == "127.0.0.1",
        tls=tls,
    )


async def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    heads = []

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        await says("200 OK", b"picture")(head, writer)

    names = Names(["127.0.0.1"], ["10.0.0.1"])  # a name that changes its mind after the check
    async with world(answer) as port:
        assert await fetcher(port, names).fetch(f"http://pics.example:{port}/a?b=c#d", left()) == b"picture"
    assert names.asked == ["pics.example"]
    assert heads[0].startswith("GET /a?b=c HTTP/1.1\r\n")
    assert f"Host: pics.example:{port}\r\n" in heads[0]
    assert "authorization" not in heads[0].lower()
    assert "cookie" not in heads[0].lower()


@pytest.mark.parametrize(
    "addresses", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], []]
)
async def test_a_name_with_any_bad_address_is_not_dialled(addresses: list[str]) -> None:
    async with world(says("200 OK", b"x")) as port:
        with pytest.raises(InvalidRequest, match="address"):
            await fetcher(port, Names(addresses)).fetch(f"http://pics.example:{port}/", left())


async def test_without_an_allow_list_nothing_is_fetched() -> None:
    with pytest.raises(InvalidRequest, match="data URLs"):
        await ImageFetcher(ImageSettings()).fetch("https://img.example.com/a.png", left())


async def test_the_real_resolver_and_the_real_rule_refuse_loopback() -> None:
    settings = ImageSettings(allowed_hosts=("localhost",))
    with pytest.raises(InvalidRequest, match="address"):
        await ImageFetcher(settings).fetch("https://localhost/", left())


async def test_redirects_are_followed_by_the_same_rules() -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        targets = {
            "/start": f"http://more.example:{port}/relative",
            "/relative": "end",
            "/away": f"http://other.example:{port}/end",
            "/scheme": "file:///etc/passwd",
            "/port": "http://more.example:22/",
            "/loop": "/loop",
            "/nowhere": "",
        }
        path = head.split()[1]
        if path in targets:
            await says("302 Found", Location=targets[path])(head, writer)
        else:
            await says("200 OK", b"end")(head, writer)

    async with world(answer) as port:
        assert await fetcher(port).fetch(f"http://pics.example:{port}/start", left()) == b"end"
        for path, why in (
            ("away", "does not fetch"),
            ("scheme", "not fetched by"),
            ("port", "does not fetch"),
            ("loop", "redirects more than 3"),
            ("nowhere", "nowhere"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await fetcher(port).fetch(f"http://pics.example:{port}/{path}", left())


async def test_a_redirect_to_an_allowed_name_with_a_private_address_is_refused() -> None:
    async with world(says("302 Found", Location="/again")) as port:
        with pytest.raises(InvalidRequest, match="address"):
            await fetcher(port, Names(["127.0.0.1"], ["169.254.169.254"])).fetch(
                f"http://pics.example:{port}/", left()
            )


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (says("404 Not Found"), InvalidRequest, "answers 404"),
        (says("500 No"), InvalidRequest, "answers 500"),
        (says("206 Partial", b"x"), InvalidRequest, "answers 206"),
        (says("200 OK"), InvalidRequest, "empty"),
        (says("200 OK", b"x", Content_Encoding="gzip"), InvalidRequest, "encoding"),
        (says("200 OK", b"x", Content_Length="1001"), PayloadTooLarge, "1001"),
        (says("200 OK", b"x" * 1001, Content_Length="99999999"), PayloadTooLarge, "99999999"),
        (says("200 OK", b"x", Content_Length="50"), InvalidRequest, "cannot be fetched"),
        (says("nonsense"), InvalidRequest, "cannot be fetched"),
    ],
)
async def test_bad_answers(answer: Answer, error: type[Exception], why: str) -> None:
    async with world(answer) as port:
        with pytest.raises(error, match=why):
            await fetcher(port, max_bytes=1000).fetch(f"http://pics.example:{port}/", left())


async def test_an_answer_without_a_length_is_cut_off_at_the_limit() -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 1000)
            await writer.drain()

    async with world(answer) as port:
        with pytest.raises(PayloadTooLarge, match="more than 5000"):
            await fetcher(port, max_bytes=5000).fetch(f"http://pics.example:{port}/", left())


async def test_the_images_of_a_request_share_a_number_of_bytes() -> None:
    budget = left(2500)
    async with world(says("200 OK", b"x" * 1000)) as port:
        url, one = f"http://pics.example:{port}/", fetcher(port, max_bytes=1000)
        for _ in range(2):
            assert len(await one.fetch(url, budget)) == 1000
        with pytest.raises(PayloadTooLarge, match="2500 bytes together"):
            await one.fetch(url, budget)


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a certificate of pics.example that vouches for itself."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=pics.example", "-addext", "subjectAltName=DNS:pics.example"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        [*make, *subject, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return key, certificate


async def test_the_certificate_must_be_that_of_the_name(certified: tuple[Path, Path]) -> None:
    """The name in the URL, not the address that was dialled; nobody but the system's trust, unless told."""
    key, certificate = certified
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)
    trust = ssl.create_default_context(cafile=str(certificate))
    async with world(says("200 OK", b"picture"), ours) as port:
        good, other = f"https://pics.example:{port}/a", f"https://more.example:{port}/a"
        assert await fetcher(port, tls=trust, allow_http=False).fetch(good, left()) == b"picture"
        for url, tls in ((other, trust), (good, None)):
            with pytest.raises(InvalidRequest, match="cannot be fetched"):
                await fetcher(port, tls=tls, allow_http=False).fetch(url, left())


@pytest.mark.parametrize("drip", [False, True])
async def test_a_slow_server_costs_its_seconds(drip: bool) -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            writer.write(b"x" if drip else b"")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with world(answer) as port:
        with pytest.raises(InvalidRequest, match=r"within 0.3 s"):
            await fetcher(port, fetch_timeout_s=0.3).fetch(f"http://pics.example:{port}/", left())


async def test_fetches_at_a_time_are_bounded() -> None:
    dialled, gate = 0, asyncio.Event()

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        await gate.wait()
        await says("200 OK", b"x")(head, writer)

    async with world(answer) as port:
        two, url = fetcher(port, max_fetches=2), f"http://pics.example:{port}/"
        running = asyncio.gather(*(two.fetch(url, left()) for _ in range(5)))
        await asyncio.sleep(0.2)
        assert dialled <= 2
        gate.set()
        assert await running == [b"x"] * 5
        assert dialled == 5


def test_nothing_else_in_the_services_can_dial_an_address_out_of_a_request() -> None:
    """No other module of a server has a client; what ``cli`` and ``tracing`` dial, their own settings name."""
    clients = re.compile(
        r"^\s*(?:import|from) (?:httpcore|httpx|aiohttp|requests|http\.client|urllib\.request|urllib3)\b"
        r"|open_connection\(|create_connection\(",
        re.MULTILINE,
    )
    dial = {
        file.relative_to(ROOT).as_posix()
        for package in ("services", "model", "kvstore")
        for file in (ROOT / package).rglob("*.py")
        if clients.search(file.read_text())
    }
    dial = {file for file in dial if not file.startswith(("services/cli/", "model/demo/training/"))}
    assert dial == {"services/router/images/fetcher.py", "services/observability/tracing.py"}


async def test_a_closed_port_is_an_image_that_cannot_be_fetched() -> None:
    async with world(says("200 OK", b"x")) as port:
        pass
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        await fetcher(port).fetch(f"http://pics.example:{port}/", left())
