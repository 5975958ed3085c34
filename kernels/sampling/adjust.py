"""What is done to logits before a token is drawn, and log-probabilities, in plain PyTorch.

R = rows, V = vocabulary, N = changed logits of all rows together, B = 32-bit words of a mask. What is changed is listed
as (row, token) pairs, so that the work is that of the tokens concerned and not that of the vocabulary. Every function
works element by element: a row's result depends on that row only.
"""

from __future__ import annotations

import torch
from epdserve.kernels.sampling.reference import log_probs_ref
from torch import Tensor

_WORD_BITS = 32


def penalize_ref(
    logits_RV: Tensor,
    row_N: Tensor,
    token_N: Tensor,
    count_N: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
    repetition_R: Tensor,
) -> Tensor:
    """Logits of tokens seen before, made smaller: (R, V) float32.

    First a positive logit is divided by the row's repetition penalty and another one multiplied by it. Then
    ``frequency * count + presence`` is taken away where the token has occurred in the output.

    Args:
        logits_RV: (R, V) float32.
        row_N, token_N: (N,) int64, no pair twice.
        count_N: (N,) how often the token occurs in its row's output; 0 for one that is only in the prompt.
        presence_R, frequency_R, repetition_R: (R,) float32.
    """
    value_N = logits_RV[row_N, token_N]
    repetition_N = repetition_R[row_N]
    value_N = torch.where(value_N > 0, value_N / repetition_N, value_N * repetition_N)
    count_N = count_N.float()
    # two roundings whatever the processor: a product and sums of it, never fused
    value_N = value_N - frequency_R[row_N] * count_N
    value_N = torch.where(count_N > 0, value_N - presence_R[row_N], value_N)
    return logits_RV.index_put((row_N, token_N), value_N)


def add_bias_ref(logits_RV: Tensor, row_N: Tensor, token_N: Tensor, bias_N: Tensor) -> Tensor:
    """Logits with something added to some of them: (R, V) float32.

    Args:
        logits_RV: (R, V) float32.
        row_N, token_N: (N,) int64, no pair twice.
        bias_N: (N,) float32; -inf forbids the token.
    """
    return logits_RV.index_put((row_N, token_N), logits_RV[row_N, token_N] + bias_N)


def forbid_ref(logits_RV: Tensor, row_M: Tensor, allowed_MB: Tensor) -> Tensor:
    """Logits with -inf in place of what a mask does not allow: (R, V) float32.

    Args:
        logits_RV: (R, V) float32.
        row_M: (M,) int64, rows that have a mask, none twice.
        allowed_MB: (M, ceil(V / 32)) int32; bit ``v % 32`` of word ``v // 32`` says whether token ``v`` is allowed.
    """
    vocabulary = logits_RV.shape[1]
    shift = torch.arange(_WORD_BITS, dtype=torch.int32, device=allowed_MB.device)
    allowed_MV = ((allowed_MB.unsqueeze(2) >> shift) & 1).flatten(1)[:, :vocabulary]
    masked_MV = logits_RV[row_M].masked_fill_(allowed_MV == 0, float("-inf"))
    return logits_RV.index_copy(0, row_M, masked_MV)


def top_log_probs_ref(logits_RV: Tensor, token_R: Tensor, *, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probability of one token of each row, and of its likeliest tokens.

    Args:
        logits_RV: (R, V) float32.
        token_R: (R,) int64.
        top: Alternatives wanted, at most V.

    Returns:
        (R,) float32, (R, top) int64 and (R, top) float32; likeliest first, lower index first on ties.
    """
    value_RV = log_probs_ref(logits_RV)
    token_RK = _largest(value_RV, top)
    return value_RV.gather(1, token_R.unsqueeze(1)).squeeze(1), token_RK, value_RV.gather(1, token_RK)


def _largest(value_RV: Tensor, width: int) -> Tensor:
    """(R, width) int64 columns of the largest values in descending order; ties: lower index first.

    A float's bits sort as integers once those below the sign of negative ones are turned over; the inverted index
    below them makes the keys distinct.
    """
    bits = (value_RV + 0.0).view(torch.int32)  # adding zero leaves one zero of the two
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = value_RV.shape[1] - 1
    inverted = torch.arange(last, -1, -1, device=value_RV.device)
    key = ((bits.long() << 32) | inverted).topk(width, dim=1).values
    return last - (key & 0xFFFFFFFF)
