"""The indexer in training: scores of all entries, picks as masks, and the lesson it learns from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from epdserve.kernels.indexer import candidate_mask, top_entries
from epdserve.model.config import TextConfig
from epdserve.model.demo.training.ops import rotate, straight_through
from epdserve.model.demo.training.scene import FAR, Entries, Lesson, Scene
from epdserve.model.layer_plan import LayerMode, LayerSpec
from torch import Tensor
from torch.nn import functional


class Picker:
    """Index queries of one index source. Its inputs are detached: only its lesson teaches it."""

    def __init__(self, text: TextConfig, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.text, self.spec = text, spec
        self.wq_b, self.head_weights = weights["indexer.wq_b.weight"], weights["indexer.weights_proj.weight"]

    def pick(self, x_BTD: Tensor, low_BTR: Tensor, scene: Scene) -> None:
        """Put this layer's picks, candidates and lesson into the scene."""
        setting = scene.setting
        if not (setting.selects or setting.teaches_indexer):
            return
        assert self.spec.kv_source is not None, "an index source reads a cache"
        cache = scene.caches[self.spec.kv_source]
        scores_BTE = self._scores(x_BTD.detach(), low_BTR.detach(), cache, scene)
        allowed_BTE = cache.visible_TE.expand(scores_BTE.shape)
        if setting.selects:
            allowed_BTE = self._picks(scores_BTE.detach(), cache, scene)
            scene.picked_BTE[self.spec.index] = allowed_BTE
        if setting.teaches_indexer:
            scene.lessons[self.spec.index] = Lesson(scores_BTE, allowed_BTE)

    def _scores(self, x_BTD: Tensor, low_BTR: Tensor, cache: Entries, scene: Scene) -> Tensor:
        heads, width = self.text.index_n_heads, self.text.index_head_dim
        sequences, length, _ = x_BTD.shape
        q_BTHI = functional.linear(low_BTR, self.wq_b).unflatten(-1, (heads, width))
        q_BTHI = rotate(q_BTHI, scene.far_turn[:, :, None])
        rounder = scene.rounder("index")
        q_BTHI = q_BTHI if rounder is None else straight_through(q_BTHI, rounder)
        assert cache.keys_BEI is not None, "keys are made wherever picks are"
        match = torch.bmm(q_BTHI.flatten(1, 2), cache.keys_BEI.transpose(1, 2)).relu()
        share = functional.linear(x_BTD, self.head_weights) * (width * heads) ** -0.5
        scores_BTE: Tensor = (match.view(sequences, length, heads, -1) * share[..., None]).sum(2)
        return scores_BTE

    def _picks(self, scores_BTE: Tensor, cache: Entries, scene: Scene) -> Tensor:
        """(B, T, E) bool, as serving picks."""
        text = self.text
        score_RE = scores_BTE.flatten(0, 1)
        visible_R = cache.visible_TE.sum(1).repeat(len(scores_BTE))
        if self.spec.candidate_source:
            mask = candidate_mask(score_RE, visible_R, text.candidate_topk_blocks, text.candidate_block_size)
            scene.candidates_BTE = mask.view(scores_BTE.shape)
        elif self.spec.mode is LayerMode.REINDEX and scene.candidates_BTE is not None:
            score_RE = score_RE.masked_fill(~scene.candidates_BTE.flatten(0, 1), float("-inf"))
        picks_RK = top_entries(score_RE, visible_R, text.index_topk)
        chosen = torch.zeros(len(score_RE), score_RE.shape[1] + 1, dtype=torch.bool)
        chosen.scatter_(1, picks_RK.where(picks_RK >= 0, score_RE.shape[1]), True)
        return chosen[:, :-1].view(scores_BTE.shape)


def indexer_loss(scene: Scene) -> Tensor:
    """Mean divergence of the indexers' softmax from the attention mass on entries, summed over index sources."""
    total = torch.zeros(())
    for lesson in scene.lessons.values():
        mass_BTE = torch.stack(lesson.mass_BTE).sum(0)
        whole_BT = mass_BTE.sum(-1)
        counts_BT = whole_BT > 1e-3
        share = mass_BTE / (whole_BT[..., None] + 1e-9)
        said = lesson.scores_BTE.masked_fill(~lesson.allowed_BTE, FAR).log_softmax(-1)
        gap = torch.where(share > 1e-9, share * (share.clamp(min=1e-9).log() - said), 0.0).sum(-1)
        total = total + (gap * counts_BT).sum() / counts_BT.sum().clamp(min=1)
    return total
