"""Let the target write: batched decoding from prompts of one length.

Owns reading the prompts, the decoding step and its replay. Does not know what texts are for.
On CUDA one step is recorded as a graph and replayed, because so small a model is bound by launches;
where recording fails, steps run one by one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafter_svc.train.target_net import TargetNet, TargetState

WARM_STEPS = 2  # run before a step is recorded


def join_states(states: list[TargetState]) -> TargetState:
    """Join the states of parts of a batch into one."""
    position, layers = states[0].position, []
    for parts in zip(*(state.layers for state in states), strict=True):
        joined = {"room": parts[0]["room"], "position": position}
        for name in [name for name in parts[0] if name not in joined]:
            joined[name] = torch.cat([part.pop(name) for part in parts])
        layers.append(joined)
    return TargetState(layers, position)


def read_prompts(
    net: TargetNet, prompts: Tensor, room: int, dtype: torch.dtype, part_tokens: int = 65536
) -> tuple[TargetState, Tensor]:
    """State and last hidden rows [B, H] after prompts [B, P], read some rows at a time."""
    states, last = [], []
    for rows in prompts.split(max(1, part_tokens // prompts.shape[1])):
        states.append(net.new_state(room))
        last.append(net(rows, state=states[-1], dtype=dtype).hidden[:, -1].clone())
    return join_states(states), torch.cat(last)


def choose(logits: Tensor, temperatures: Tensor) -> Tensor:
    """One id per row of float32 [B, V]: the best plus noise times the temperature."""
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-7, 1 - 1e-7)))
    return (logits + temperatures[:, None] * noise).argmax(-1)


@torch.no_grad()
def generate(net: TargetNet, prompts: Tensor, length: int, temperatures: Tensor) -> Tensor:
    """Continue prompts int64 [B, P] to [B, length]; temperatures [B], 0 is greedy."""
    device, used = prompts.device, prompts.shape[1]
    half = device.type == "cuda" and torch.is_autocast_enabled("cuda")
    dtype = torch.bfloat16 if half else torch.float32
    out = prompts.new_zeros(len(prompts), length)
    out[:, :used] = prompts
    if length <= used:
        return out
    state, hidden = read_prompts(net, prompts, length, dtype)
    last = choose(net.logits(hidden), temperatures)
    out[:, used] = last

    def step() -> None:
        rows = net(last[:, None], state=state, dtype=dtype).hidden[:, -1]
        last.copy_(choose(net.logits(rows), temperatures))
        out.index_copy_(1, state.position.view(1), last[:, None])

    run_steps(step, length - used - 1, device)
    return out


def run_steps(step: Callable[[], None], count: int, device: torch.device) -> None:
    """Run a step `count` times; it reads and writes tensors that stay where they are."""
    warm = min(count, WARM_STEPS)
    if device.type != "cuda" or count <= 4 * WARM_STEPS:
        for _ in range(count):
            step()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(side)
    replay = _record(step)
    for _ in range(count - warm):
        replay()
    torch.cuda.synchronize()


def _record(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"decoding step not recorded ({error}); steps run one by one", flush=True)
        torch.cuda.synchronize()
        return step
    return graph.replay
