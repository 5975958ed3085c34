"""The batch of the next step, laid out on the host while a device runs this one.

Prompts that are prefilled usually go on: who runs them says which rows will be next, and by the time the step has ended
their index tensors are on the device. Something else may have come by then; such a batch is thrown away and costs what
the host would have spent waiting. Where the host itself computes, nothing is laid out ahead.
"""

from collections.abc import Sequence

import torch
from epdserve.model.batch import BatchShape, ForwardBatch, Segment


class BatchAhead:
    """Builds batches, one of them before it is wanted. Owned by the step loop, not thread-safe.

    Attributes:
        useful: Whether ``foresee`` lays out anything: only where the host waits for a device.
        foreseen: Batches that were laid out ahead.
        met: Those of them that were run.
    """

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._next: tuple[tuple[Segment, ...], tuple[object, ...], ForwardBatch] | None = None
        self.useful = device.type == "cuda"
        self.foreseen = self.met = 0

    def foresee(self, segments: Sequence[Segment]) -> None:
        """Lay out what will probably be asked for next; images come when they come, so those with one are left out."""
        self._next = None
        if not self.useful or not segments or any(segment.images for segment in segments):
            return
        facts = self._facts(segments)
        self._next = tuple(segments), facts, ForwardBatch.build(segments, self._shape, self._device)
        self.foreseen += 1

    def batch(self, segments: Sequence[Segment]) -> ForwardBatch:
        """Index tensors of these segments.

        Raises:
            ValueError: As ``ForwardBatch.build``.
        """
        ahead, self._next = self._next, None
        if ahead is not None and self._is_of(segments, ahead[0], ahead[1]):
            self.met += 1
            return ahead[2]
        return ForwardBatch.build(segments, self._shape, self._device)

    def _is_of(
        self, segments: Sequence[Segment], foreseen: tuple[Segment, ...], facts: tuple[object, ...]
    ) -> bool:
        return (
            len(segments) == len(foreseen)
            and all(
                ours.tokens is theirs.tokens and not ours.images
                for ours, theirs in zip(segments, foreseen, strict=True)
            )
            and self._facts(segments) == facts
        )

    def _facts(self, segments: Sequence[Segment]) -> tuple[object, ...]:
        """All that a batch depends on but the tokens: pages too, for a sealed page may give way to its double."""
        block = self._shape.block_tokens
        return tuple(
            (
                s.start,
                s.count,
                s.slot,
                s.encoder_floor,
                s.decoder_from,
                s.decoder_floor,
                s.publish_from,
                s.outputs,
                tuple(s.pages[: -(-(s.start + s.count) // block)]),
            )
            for s in segments
        )
