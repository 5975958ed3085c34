"""Sizes of what a store keeps. One store keeps blocks of one size, of any number of models that agree on it."""

from __future__ import annotations

from dataclasses import dataclass

from epdserve.services.errors import Unavailable
from epdserve.services.store.config import StoreSettings


@dataclass(frozen=True, slots=True)
class StoreGeometry:
    """Bytes of a block and of a tail, with and without header and padding."""

    block_tokens: int
    payload_bytes: int
    page_bytes: int
    tail_payload_bytes: int
    tail_bytes: int

    @classmethod
    def of(cls, settings: StoreSettings) -> StoreGeometry:
        """The sizes that settings say, or those of the model that they name.

        Raises:
            Unavailable: There is no such model.
        """
        if settings.geometry is not None:
            return cls(**settings.geometry.model_dump())
        # imports torch, which a store that is told its sizes can do without
        from epdserve.model.config import ModelConfig
        from epdserve.model.errors import ModelError
        from epdserve.model.kv_layout import KVLayout
        from epdserve.model.tail import TailLayout

        assert settings.model_dir is not None, "settings name a model or sizes"
        try:
            config = ModelConfig.from_directory(settings.model_dir)
            layout = KVLayout.of(
                config, block_tokens=settings.block_tokens, entry_format=settings.precision.entry_format
            )
        except (ModelError, OSError, ValueError) as error:
            raise Unavailable(f"model {settings.model_dir}: {error}") from error
        tail = TailLayout.of(config, layout)
        return cls(
            settings.block_tokens, layout.payload_bytes, layout.page_bytes, tail.payload_bytes, tail.nbytes
        )
