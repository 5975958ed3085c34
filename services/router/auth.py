"""Who is asking: API keys from a file, and the key that keeps one tenant's cached blocks from another's."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from epdserve.kvstore.hashing import TENANT_LABEL_BYTES
from epdserve.services.errors import Unauthenticated

Isolation: TypeAlias = Literal["none", "key", "user"]

_HASHED = "sha256:"


class KeyRing:
    """API keys, kept as SHA-256 digests. Without keys everybody is let in under the empty name."""

    def __init__(self, names_by_digest: Mapping[bytes, str]) -> None:
        self._names = dict(names_by_digest)

    @classmethod
    def from_file(cls, path: Path | None) -> KeyRing:
        """Read ``NAME KEY`` or ``NAME sha256:HEX`` lines; ``#`` starts a comment.

        Raises:
            ValueError: A line that is neither, or a file without keys: an empty file must not open the door.
        """
        if path is None:
            return cls({})
        names: dict[bytes, str] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            if len(words) != 2:
                raise ValueError(f"{path}:{number}: expected NAME KEY")
            names[_digest(words[1], f"{path}:{number}")] = words[0]
        if not names:
            raise ValueError(f"{path} holds no keys")
        return cls(names)

    def entries(self) -> Iterator[tuple[bytes, str]]:
        """Digest and owner of every key."""
        yield from self._names.items()

    def authenticate(self, *, authorization: str, api_key: str = "") -> str:
        """Name of the key's owner. A bearer token wins over ``x-api-key``.

        Raises:
            Unauthenticated: Keys are wanted, and this is none of them.
        """
        if not self._names:
            return ""
        scheme, _, token = authorization.partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else api_key
        if not key:
            raise Unauthenticated("no API key given: send Authorization: Bearer KEY")
        asked = hashlib.sha256(key.encode()).digest()
        found = ""
        for digest, name in self._names.items():
            # Every key is compared in full, so that time tells nothing about which was near
            if hmac.compare_digest(digest, asked):
                found = name
        if not found:
            raise Unauthenticated("this API key is not known here")
        return found


def _digest(word: str, place: str) -> bytes:
    if not word.startswith(_HASHED):
        return hashlib.sha256(word.encode()).digest()
    digest = word[len(_HASHED) :]
    if len(digest) != 64:
        raise ValueError(f"{place}: sha256: wants 64 hex digits, got {len(digest)}")
    return bytes.fromhex(digest)


@lru_cache(4096)
def tenant_key(isolation: Isolation, *, key_name: str, user: str, cache_salt: str, epoch: str = "") -> bytes:
    """48 bytes that key a request's block hashes: equal for those who may share blocks.

    A salt in the request always separates, and so does an epoch; names only where isolation asks for it. The first 16
    bytes are the API key's alone: what is stored carries a digest of them (``kvstore.hashing.tenant_label``), by which
    all of a tenant's bytes are found, whatever users, salts and epochs they are of.
    """
    tenant = key_name if isolation in ("key", "user") else ""
    user = user if isolation == "user" else ""
    within = _digest_of(tenant, user, cache_salt, *([epoch] if epoch else ()), nbytes=32)
    return _digest_of(tenant, nbytes=TENANT_LABEL_BYTES) + within


def _digest_of(*parts: str, nbytes: int) -> bytes:
    digest = hashlib.blake2b(digest_size=nbytes, person=b"epdserve-tenant")
    for part in parts:
        raw = part.encode()
        digest.update(struct.pack("<Q", len(raw)))
        digest.update(raw)
    return digest.digest()
