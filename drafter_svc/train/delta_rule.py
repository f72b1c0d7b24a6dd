"""The gated delta rule, in chunks for training and token by token for decoding.

Knows q, k, v, beta and the log decay of each head. Does not know projections, norms or layers.
Both forms compute, per head and token,  S <- a S + k (outer) beta (v - (a S)^T k),  o = S^T q.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), section 3.3 (chunked form).
"""

import torch
from torch import Tensor
from torch.nn import functional


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower-triangular A.

    Forward substitution, not the product of powers of -A: keys of repeated tokens are nearly
    parallel, and then those powers overflow float32's precision. The gradient needs the result
    only, so one matrix is kept for backward.
    """

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        """Invert I + a; a is float32 [..., C, C]."""
        eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype).expand_as(a)
        inverse = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """Return -T^t grad T^t for T the inverse."""
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return -(turned @ grad @ turned)


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run the rule over T tokens by matrix products.

    Args:
        q: float32 [B, H, T, K], normalised and scaled.
        k: float32 [B, H, T, K], normalised.
        v: float32 [B, H, T, V].
        beta: float32 [B, H, T], 0..1.
        log_decay: float32 [B, H, T], at most 0.
        state: float32 [B, H, K, V] before the first token; None is zeros.
        chunk: tokens per block; T is padded to a multiple of it.

    Returns:
        float32 [B, H, T, V] outputs and the state after the last token.
    """
    batch, heads, length, key_dim = q.shape
    pad = -length % chunk
    if pad:  # a padded token has beta 0 and decay 1, so it leaves the state as it is
        q, k, v = (functional.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
        beta, log_decay = functional.pad(beta, (0, pad)), functional.pad(log_decay, (0, pad))
    q, k, v = (t.unflatten(2, (-1, chunk)) for t in (q, k, v))
    beta, log_decay = (t.unflatten(2, (-1, chunk)) for t in (beta, log_decay))

    total = log_decay.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    gap = total[..., :, None] - total[..., None, :]
    decay = gap.masked_fill(~lower, float("-inf")).exp()
    from_start = total.exp()[..., None]
    last = total[..., -1:]

    beta_k = k * beta[..., None]
    inverse = UnitLowerInverse.apply(((beta_k @ k.mT) * decay).tril(-1))
    written = inverse @ (v * beta[..., None])
    read = inverse @ (beta_k * from_start)
    to_end = k * (last - total).exp()[..., None]
    eye = torch.eye(key_dim, device=q.device, dtype=q.dtype)
    step = last.exp()[..., None] * eye - to_end.mT @ read
    push = to_end.mT @ written

    if state is None:
        state = q.new_zeros(batch, heads, key_dim, v.shape[-1])
    push = torch.cat([(step[:, :, :1] @ state[:, :, None] + push[:, :, :1]), push[:, :, 1:]], 2)
    ends = states_after(step, push)
    start = torch.cat([state[:, :, None], ends[:, :, :-1]], 2)
    delta = written - read @ start
    out = (q * from_start) @ start + ((q @ k.mT) * decay) @ delta
    return out.flatten(2, 3)[:, :, :length], ends[:, :, -1]


def states_after(step: Tensor, push: Tensor) -> Tensor:
    """States after each chunk, where chunk i maps its start S to step_i S + push_i.

    Maps of 1, 2, 4 .. chunks are combined, so that n chunks cost log n products in a row.

    Args:
        step: float32 [B, H, N, K, K].
        push: float32 [B, H, N, K, V]; the first one already holds the state before it.

    Returns:
        float32 [B, H, N, K, V].
    """
    reach = 1
    while reach < push.shape[2]:
        later = step[:, :, reach:]
        push = torch.cat([push[:, :, :reach], push[:, :, reach:] + later @ push[:, :, :-reach]], 2)
        if 2 * reach < push.shape[2]:
            step = torch.cat([step[:, :, :reach], later @ step[:, :, :-reach]], 2)
        reach *= 2
    return push


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> Tensor:
    """Run the rule for one token, changing `state` in place.

    Args:
        q: float32 [B, H, K].
        k: float32 [B, H, K].
        v: float32 [B, H, V].
        beta: float32 [B, H].
        log_decay: float32 [B, H].
        state: float32 [B, H, K, V], overwritten.

    Returns:
        float32 [B, H, V].
    """
    state.mul_(log_decay.exp()[..., None, None])
    delta = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state.addcmul_(k[..., None], delta[..., None, :])
    return (q[..., None, :] @ state).squeeze(-2)
