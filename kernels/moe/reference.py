"""Expert routing in plain PyTorch (spec/backbone.md 6). T = tokens, E = experts, k = experts per token."""

from __future__ import annotations

from torch import Tensor


def route_ref(logits_TE: Tensor, bias_E: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights.

    Args:
        logits_TE: (T, E) float32 gate logits.
        bias_E: (E,) or (T, E) float32; decides who is chosen and never enters the weights.
        top_k: Experts per token.
        scaling: Factor of the normalised weights.

    Returns:
        experts (T, k) int64 in descending biased score (ties: lower index first), weights (T, k) float32.
    """
    affinity = _softplus(logits_TE.float()).sqrt_()
    experts = (affinity + bias_E).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = affinity.gather(1, experts)
    total = chosen.sum(1, keepdim=True).add_(1e-20)
    return experts, chosen.div_(total).mul_(scaling)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) from parts that round every element alike (torch's own treats a tensor's end differently)."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def swiglu_ref(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float32; same shape as the arguments."""
    clamped = gate.float().clamp(max=limit)
    denominator = clamped.neg().exp_().add_(1.0)
    return clamped.div_(denominator).mul_(up.float().clamp(-limit, limit))
