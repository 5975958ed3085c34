"""An image chat through ``epdserve up`` as it starts without a word: the vision encoder beside prefill."""

import base64

from support.stack import Stack
from support.vision import encoded, picture


def test_an_image_chat_is_answered_and_its_picture_hits_the_next_time(stack: Stack) -> None:
    url = "data:image/png;base64," + base64.b64encode(encoded(picture(90, 60, seed=7))).decode()
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
    before = lookups(stack)
    first = stack.chat(content).json()  # type: ignore[arg-type]
    again = stack.chat(content).json()  # type: ignore[arg-type]
    assert first["usage"]["prompt_tokens"] > 184
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160
    made = {outcome: count - before[outcome] for outcome, count in lookups(stack).items()}
    assert made["miss"] == 1
    assert made["hit"] >= 1


def lookups(stack: Stack) -> dict[str, float]:
    """Images looked up so far, by outcome."""
    metrics = stack.metrics()["prefill-0"]
    name = 'epdserve_embedding_lookups_total{outcome="%s"}'
    return {outcome: metrics.get(name % outcome, 0.0) for outcome in ("hit", "miss")}
