"""One training run: steps, optimisers, and a state on disk from which it goes on."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Final

import torch
from epdserve.model.compressed_tokens import derive_token_map
from epdserve.model.config import ModelConfig
from epdserve.model.demo.preset import config_document
from epdserve.model.demo.training.facts import TASKS
from epdserve.model.demo.training.forward import TrainableBackbone
from epdserve.model.demo.training.indexing import indexer_loss
from epdserve.model.demo.training.muon import Muon, split_parameters
from epdserve.model.demo.training.opening import Openings
from epdserve.model.demo.training.renewal import renew_heads
from epdserve.model.demo.training.rounding import as_stored
from epdserve.model.demo.training.scene import Scene, Setting
from epdserve.model.demo.training.schedule import Stage
from epdserve.model.demo.training.scores import Scores
from epdserve.model.demo.training.sequences import Sequences
from epdserve.model.demo.training.start import start_weights
from epdserve.model.demo.training.vocabulary import SILENT, Vocabulary
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

STATE_FILE: Final = "state.safetensors"
PROGRESS_FILE: Final = "progress.json"
_BALANCE: Final = 0.002  # how far a router bias moves a step
_CLIP: Final = 1.0
_LARGEST_GAP: Final = 1200


class Trainer:
    """Weights in training and where in the schedule they stand.

    Args:
        directory: Holds the state; a state there is taken up.
        seed: Of the first weights and of all data.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.seed = directory, seed
        self.config = ModelConfig.from_json(config_document(seed))
        self.vocabulary = Vocabulary()
        self.openings = Openings(self.vocabulary)
        self.token_map_V = torch.from_numpy(derive_token_map(Tokenizer.from_str(self.vocabulary.definition)))
        self.stage_name, self.step, self.tokens = "", 0, 0
        self.weights = start_weights(self.config, seed, self.token_map_V, self.vocabulary.texts())
        self._kept: dict[str, Tensor] = {}
        if (directory / PROGRESS_FILE).exists():
            self._load()

    def begin(self, stage: Stage) -> None:
        """Make optimisers for a stage; go on inside it if the state stands there."""
        if stage.renews and self.stage_name != stage.name:
            renew_heads(self.config, self.weights, self.seed)
        for name, value in self.weights.items():
            learns = ".indexer." in name if stage.indexer else "gate.bias" not in name
            frozen = stage.frozen and re.search(stage.frozen, name)
            value.requires_grad_(learns and not frozen)
        matrices, others = split_parameters(self.weights)
        self.muon = Muon(matrices, rate=stage.rate, momentum=0.95)
        self.adam = torch.optim.Adam(others, lr=stage.adam_rate, betas=(0.9, 0.98), fused=True)
        self.others = others
        if self.stage_name != stage.name:
            self.stage_name, self.step, self.tokens = stage.name, 0, 0
        elif self._kept:
            self._restore_optimisers()
        self._kept = {}

    def run_step(self, stage: Stage, scores: Scores) -> None:
        """One step of a stage."""
        draw = random.Random(f"{self.seed} {stage.name} {self.step}")
        length, count, _ = draw.choices(stage.shapes, [shape[2] for shape in stage.shapes])[0]
        ids_BT, labels_BT = Sequences(self.vocabulary, self.openings, draw, stage.mixture).batch(
            count, length
        )
        scene = self._scene(stage, ids_BT, draw)
        share = self._share(stage)
        weights = as_stored(self.config, self.weights) if stage.rounds else self.weights
        loss, backbone = self._loss(stage, weights, scene, labels_BT, scores)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.others, _CLIP)
        for group in self.adam.param_groups:
            group["lr"] = stage.adam_rate * share
        self.muon.step(share)
        self.adam.step()
        for value in self.weights.values():
            value.grad = None
        if not stage.indexer:
            self._balance(backbone)
        self.step += 1
        self.tokens += ids_BT.numel()

    def _loss(
        self, stage: Stage, weights: dict[str, Tensor], scene: Scene, labels_BT: Tensor, scores: Scores
    ) -> tuple[Tensor, TrainableBackbone]:
        backbone = TrainableBackbone(self.config, weights, self.token_map_V)
        if stage.sinkhorn_steps is not None:
            for layer in backbone.layers:
                for hyper in layer.hypers:
                    hyper.iters = stage.sinkhorn_steps
        exit_ND = backbone.forward(scene)
        answers = functional.pad(labels_BT[:, 1:], (0, 1), value=SILENT).flatten()
        rows = (answers != SILENT).nonzero().flatten()
        targets = functional.pad(scene.ids_BT[:, 1:], (0, 1)).flatten()[rows]
        logits = backbone.logits(exit_ND[rows])
        losses = functional.cross_entropy(logits, targets, reduction="none")
        scores.add(rows, answers[rows], losses.detach(), logits.detach().argmax(-1) == targets)
        loss = losses.mean()
        if scene.setting.teaches_indexer:
            taught = indexer_loss(scene)
            scores.note("indexer", float(taught.detach()))
            loss = taught if stage.indexer else loss + taught
        return loss, backbone

    def _scene(self, stage: Stage, ids_BT: Tensor, draw: random.Random) -> Scene:
        count, length = ids_BT.shape
        setting = Setting(
            rounds_cache=stage.rounds, selects=stage.selects, teaches_indexer=stage.indexer or stage.selects
        )
        positions = torch.arange(length)[None]
        if stage.gaps:
            jumps = torch.zeros(count, length, dtype=torch.long)
            for row in range(count):
                if draw.random() < stage.gaps:
                    for _ in range(4):
                        jumps[row, draw.randrange(1, length)] += draw.randrange(_LARGEST_GAP)
            positions = positions + jumps.cumsum(1)
        floors = tuple(self._floors(stage, count, length, draw) for _ in range(2))
        return Scene(self.config.text, ids_BT, setting, positions, (floors[0], floors[1]))

    def _floors(self, stage: Stage, count: int, length: int, draw: random.Random) -> Tensor | None:
        if not stage.replays:
            return None
        floors = torch.zeros(count, length, dtype=torch.long)
        for row in range(count):
            if draw.random() < stage.replays:
                for start in sorted(draw.randrange(length) for _ in range(2)):
                    floors[row, start:] = start
        return floors

    def _share(self, stage: Stage) -> float:
        """Share of the full rates: a warm start, and a linear fall at the end."""
        left = 1 - self.tokens / stage.tokens
        cooling = min(1.0, max(left, 0.02) / stage.cool) if stage.cool else 1.0
        return min(1.0, (self.step + 1) / stage.warm_steps) * cooling

    def _balance(self, backbone: TrainableBackbone) -> None:
        for number, layer in enumerate(backbone.layers):
            load = layer.experts.load_E
            if load is not None:
                bias = self.weights[f"layers.{number}.ffn.gate.bias"]
                bias.add_(_BALANCE * (load.mean() - load).sign())
                self.weights[f"layers.{number}.ffn.gate.bias_vl"].copy_(bias)

    def save(self) -> None:
        """Write the state: a crash leaves the one before."""
        tensors = {f"weight.{name}": value.detach() for name, value in self.weights.items()}
        names = {id(value): name for name, value in self.weights.items()}
        for value, average in self.muon.moving:
            tensors[f"muon.{names[id(value)]}"] = average
        for value, state in self.adam.state.items():
            for key, part in state.items():
                tensors[f"adam.{key}.{names[id(value)]}"] = part
        self.directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, self.directory / (STATE_FILE + ".new"))
        progress = {"stage": self.stage_name, "step": self.step, "tokens": self.tokens, "tasks": list(TASKS)}
        (self.directory / (PROGRESS_FILE + ".new")).write_text(json.dumps(progress))
        for name in (STATE_FILE, PROGRESS_FILE):
            os.replace(self.directory / (name + ".new"), self.directory / name)

    def _load(self) -> None:
        progress = json.loads((self.directory / PROGRESS_FILE).read_text())
        self.stage_name, self.step, self.tokens = progress["stage"], progress["step"], progress["tokens"]
        self._kept = load_file(self.directory / STATE_FILE)
        for name, value in self.weights.items():
            value.copy_(self._kept[f"weight.{name}"])

    def _restore_optimisers(self) -> None:
        names = {id(value): name for name, value in self.weights.items()}
        for value, average in self.muon.moving:
            average.copy_(self._kept[f"muon.{names[id(value)]}"])
        for value in self.others:
            prefix = "adam.{}." + names[id(value)]
            keys = ("step", "exp_avg", "exp_avg_sq")
            if prefix.format("step") in self._kept:  # a tensor that never had a gradient has no state
                self.adam.state[value] = {key: self._kept[prefix.format(key)].clone() for key in keys}
