"""What images a router takes, and from where."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ImageSettings(BaseModel):
    """Limits on images of requests.

    Attributes:
        allowed_hosts: From which images are fetched: "images.example.com", or "*.example.com" for all below it, with
            ":PORT" for another port than the scheme's. Empty: none is fetched, only data URLs are taken.
        allow_http: Fetch without TLS too.
        max_images: Of a request.
        max_bytes: Of one image.
        max_total_bytes: Of all images of a request.
        max_pixels, max_side, max_frames: Of one image, as its header tells.
        max_url_chars: Longer URLs are refused.
        max_redirects: Each of them must lead to an allowed host again.
        fetch_timeout_s: For one image, redirects included.
        max_fetches: At a time, of all requests.
        remembered: Spans of images that are not measured again.
        encode_first: Begin with a prefill only when its images are embedded. Then no KV page waits for an image, but
            the text before it is not computed meanwhile, and images that a prefix hit makes needless are waited for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_hosts: tuple[str, ...] = ()
    allow_http: bool = False
    max_images: int = Field(default=64, ge=0)
    max_bytes: int = Field(default=32 * 2**20, ge=1)
    max_total_bytes: int = Field(default=48 * 2**20, ge=1)
    max_pixels: int = Field(default=64_000_000, ge=1)
    max_side: int = Field(default=16_384, ge=1)
    max_frames: int = Field(default=1_000, ge=1)
    max_url_chars: int = Field(default=8192, ge=1)
    max_redirects: int = Field(default=3, ge=0)
    fetch_timeout_s: float = Field(default=10.0, gt=0)
    max_fetches: int = Field(default=16, ge=1)
    remembered: int = Field(default=4096, ge=1)
    encode_first: bool = False
