"""Attention of one layer over whole sequences: window, entries and sink in one softmax (spec/backbone 3-5)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from epdserve.model.config import TextConfig
from epdserve.model.demo.training.indexing import Picker
from epdserve.model.demo.training.joint_attention import JointAttention
from epdserve.model.demo.training.ops import pool_pairs, rms_norm, rotate, straight_through
from epdserve.model.demo.training.scene import Entries, Scene, as_bias
from epdserve.model.layer_plan import LayerMode, LayerSpec
from torch import Tensor
from torch.nn import functional


class Attention:
    """One attention sub-block in any of the four layer modes."""

    def __init__(
        self, text: TextConfig, spec: LayerSpec, weights: Mapping[str, Tensor], *, above_cut: bool
    ) -> None:
        prefix = f"layers.{spec.index}.attn."
        self.text, self.spec, self.above_cut = text, spec, above_cut
        self.heads, self.width, self.eps = text.num_attention_heads, text.head_dim, text.rms_norm_eps
        self.weights = {
            name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)
        }
        self.picker = Picker(text, spec, self.weights) if spec.scores_entries else None

    def forward(self, x_BTD: Tensor, scene: Scene) -> Tensor:
        """(B, T, D) normed input -> (B, T, D)."""
        w, spec = self.weights, self.spec
        turn = scene.far_turn if spec.ratio else scene.near_turn
        low_BTR = rms_norm(functional.linear(x_BTD, w["wq_a.weight"]), w["q_norm.weight"], self.eps)
        q_BTHD = functional.linear(low_BTR, w["wq_b.weight"]).unflatten(-1, (self.heads, self.width))
        q_BTHD = rotate(q_BTHD, turn[:, :, None])
        kv_BTD = rms_norm(functional.linear(x_BTD, w["wkv.weight"]), w["kv_norm.weight"], self.eps)
        kv_BTD = _rounded(rotate(kv_BTD, turn), scene, "window")
        if spec.mode is LayerMode.FULL:
            scene.caches[spec.index] = self._publish(x_BTD, turn, scene)
        if self.picker is not None:
            self.picker.pick(x_BTD, low_BTR, scene)
        out_BTHD = rotate(self._attend(q_BTHD, kv_BTD, scene), turn.conj()[:, :, None])
        groups, rank = self.text.o_groups, self.text.o_lora_rank
        grouped = out_BTHD.reshape(-1, groups, self.heads // groups * self.width).transpose(0, 1)
        low = torch.bmm(grouped, w["wo_a.weight"].unflatten(0, (groups, rank)).transpose(1, 2))
        out: Tensor = functional.linear(low.transpose(0, 1).flatten(1), w["wo_b.weight"])
        return out.view(x_BTD.shape)

    def _publish(self, x_BTD: Tensor, turn: Tensor, scene: Scene) -> Entries:
        """Entries and index keys of this KV source. An index key learns from its own lesson alone."""
        w, ratio = self.weights, self.spec.ratio
        content = functional.linear(x_BTD, w["compressor.wkv.weight"])
        if ratio == 2:
            gate = functional.linear(x_BTD, w["compressor.wgate.weight"])
            content = pool_pairs(content[:, ::2], gate[:, ::2], content[:, 1::2], gate[:, 1::2])
        latent_BED = rms_norm(content, w["compressor.norm.weight"], self.eps)
        opening_turn = turn[:, ::ratio]
        main_BED = _rounded(rotate(latent_BED, opening_turn), scene, "main")
        keys_BEI = None
        if scene.setting.selects or scene.setting.teaches_indexer:
            key = functional.linear(latent_BED.detach(), w["indexer.wk.weight"])
            key = rms_norm(key, w["indexer.k_norm.weight"], self.eps)
            keys_BEI = _rounded(rotate(key, opening_turn), scene, "index")
        visible_TE = (scene.row_T[:, None] + 1) // ratio > torch.arange(main_BED.shape[1])
        return Entries(main_BED, keys_BEI, visible_TE)

    def _attend(self, q_BTHD: Tensor, kv_BTD: Tensor, scene: Scene) -> Tensor:
        """(B, T, H, D)."""
        window = scene.window
        stretches = kv_BTD.shape[1] // window
        padded = functional.pad(kv_BTD, (0, 0, window, 0)).unflatten(1, (stretches + 1, window))
        near = torch.cat([padded[:, :-1], padded[:, 1:]], dim=2).flatten(0, 1)  # (B * stretches, 2W, D)
        near_bias = scene.window_bias(above_cut=self.above_cut)
        cache = scene.caches[self.spec.kv_source] if self.spec.kv_source is not None else None
        far, far_bias = (None, None) if cache is None else (cache.main_BED, self._far_bias(cache, scene))
        out_BTHD: Tensor
        out_BTHD, mass_BTE = JointAttention.apply(
            q_BTHD * self.width**-0.5, near, near_bias, far, far_bias, self.weights["attn_sink"]
        )  # type: ignore[no-untyped-call]
        if scene.setting.teaches_indexer and self.spec.index_source in scene.lessons:
            scene.lessons[self.spec.index_source].mass_BTE.append(mass_BTE)
        return out_BTHD

    def _far_bias(self, cache: Entries, scene: Scene) -> Tensor:
        """(B or 1, T, E)."""
        assert self.spec.index_source is not None, "a layer with a cache has an index source"
        picked = scene.picked_BTE.get(self.spec.index_source)
        return cache.bias_BTE if picked is None else as_bias(picked)


def _rounded(x: Tensor, scene: Scene, kind: str) -> Tensor:
    rounder = scene.rounder(kind)
    return x if rounder is None else straight_through(x, rounder)
