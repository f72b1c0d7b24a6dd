"""Milliseconds and errors of Gated DeltaNet on this device, form against form.

    python tests/device/time_delta.py --out FILE [--seconds 60]

Published sizes: 16 key and 48 value heads of 128, hidden 2560, bfloat16 weights. Prints a line per
measurement and writes the same lines to FILE; what fails is printed whole and does not stop it.
"""

import argparse
import time
import traceback
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from target_svc.models.blocks import delta_kernel, gated_delta
from target_svc.models.blocks.delta_kernel import DeltaKernels, device_language, fit_sizes
from target_svc.models.blocks.gated_delta import DeltaShape, DeltaWeights, GatedDelta
from target_svc.models.states.recurrent import RecurrentRows
from target_svc.models.states.rows import RowWindow

SHAPE = DeltaShape(16, 48, 128, 128, 4, "sigmoid")
HIDDEN = 2560
TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048)
LAYOUTS = ((4, 32), (8, 16), (8, 32), (16, 8), (16, 16), (4, 16), (2, 32))  # lanes, columns


class Report:
    """Lines to the screen and to a file, within a time."""

    def __init__(self, path, seconds):
        self._path, self._lines = path, []
        self._until = time.monotonic() + seconds

    def line(self, text):
        print(text, flush=True)
        self._lines.append(text)
        if self._path:
            self._path.write_text("\n".join(self._lines) + "\n")

    def attempt(self, name, work):
        """Run `work` and print what it returns, or why it failed."""
        if time.monotonic() > self._until:
            self.line(f"{name:<34} not measured: out of time")
            return
        try:
            self.line(f"{name:<34} {work()}")
        except Exception:  # noqa: BLE001 - the text of any failure is the result
            self.line(f"{name:<34} FAILED\n{traceback.format_exc()}")


def milliseconds(work, layers, repeats=7):
    """Median ms of one of `layers` independent calls that are evaluated together."""
    mx.eval([work() for _ in range(layers)])
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval([work() for _ in range(layers)])
        spent.append((time.perf_counter() - start) * 1e3 / layers)
    return sorted(spent)[len(spent) // 2]


def layers_for(tokens):
    """Fewer calls per measurement where one is long."""
    return 36 if tokens <= 64 else 6


def sizes_of(lanes=None, columns=None):
    """The kernels' sizes, with another thread layout where given."""
    sizes = fit_sizes(
        (SHAPE.key_heads, SHAPE.groups),
        (SHAPE.key_dim, SHAPE.value_dim),
        SHAPE.kernel,
        is_silu=False,
        floor=1e-6 * SHAPE.key_dim * SHAPE.value_dim,
        unit_eps=1e-6,
    )
    return sizes if lanes is None else replace(sizes, lanes=lanes, columns=columns)


def random_rows(tokens, seed=0):
    """Packed rows [T, W] and their float64 parts by name."""
    rng = np.random.default_rng(seed)
    heads = (SHAPE.key_heads, SHAPE.key_dim)
    q, k = (rng.standard_normal((tokens, *heads)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((tokens, SHAPE.value_heads, SHAPE.value_dim))
    alpha = 1 / (1 + np.exp(-3 - rng.standard_normal((tokens, SHAPE.value_heads))))
    beta = 1 / (1 + np.exp(-rng.standard_normal((tokens, SHAPE.value_heads))))
    dots = np.repeat((q * k).sum(-1), SHAPE.groups, axis=-1)
    gates = np.stack([alpha, beta, dots, np.zeros_like(dots)], axis=-1)
    parts = [x.reshape(tokens, -1) for x in (q, k, v, gates)]
    packed = mx.array(np.concatenate(parts, axis=1).astype(np.float32))
    return packed, {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}


def float64_rule(parts, state):
    """Outputs [T, Hv, Dv] and the last state, by the recurrence."""
    outs = []
    q, k = (np.repeat(parts[name], SHAPE.groups, axis=1) for name in "qk")
    for t in range(len(q)):
        state = state * parts["alpha"][t][:, None, None]
        error = parts["v"][t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (parts["beta"][t][:, None] * error)[:, None]
        outs.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.stack(outs), state


def new_state():
    """A random state [Hk, G, Dk, Dv] with its float64 twin [Hv, Dk, Dv]."""
    shape = (SHAPE.key_heads, SHAPE.groups, SHAPE.key_dim, SHAPE.value_dim)
    state = (np.random.default_rng(9).standard_normal(shape) * 0.1).astype(np.float32)
    return mx.array(state), state.astype(np.float64).reshape(-1, *shape[2:])


def check_kernels(kernels, tokens):
    """Errors against float64, and whether rows and replays keep their bits."""
    packed, parts = random_rows(tokens)
    before, exact = new_state()
    out, after = kernels.run(packed, packed, 0, before, settles=True)
    wanted, wanted_state = float64_rule(parts, exact)
    error = np.abs(np.array(out).reshape(wanted.shape) - wanted).max()
    state_error = np.abs(np.array(after).reshape(wanted_state.shape) - wanted_state).max()
    one = kernels.run(packed[:1], packed, 0, before, settles=True)[0]
    same = [bool(mx.array_equal(out[:1], one).item())]
    half = tokens // 2
    if half:
        first = kernels.run(packed[:half], packed, 0, before, settles=False)
        same.append(bool(mx.array_equal(first[1], before).item()))
        second = kernels.run(packed[half:], packed[:half], half, before, settles=True)
        same.append(bool(mx.array_equal(second[0], out[half:]).item()))
        same.append(bool(mx.array_equal(second[1], after).item()))
        replayed = kernels.replay(packed, half, before)
        third = kernels.run(packed[half:], packed, 0, replayed, settles=True)
        same.append(bool(mx.array_equal(third[1], after).item()))
    return f"error out {error:.1e} state {state_error:.1e}  bit-equal {same}"


def time_kernels(kernels):
    """Ms by tokens, with a replay of half of a round of at most 16 before."""
    found = []
    before, _ = new_state()
    for tokens in TOKENS:
        packed, _ = random_rows(tokens)
        mx.eval(packed, before)
        ms = milliseconds(
            lambda p=packed: kernels.run(p, p, 0, before, settles=True), layers_for(tokens)
        )
        found.append(f"{tokens}: {ms:.4f}")
        if 1 < tokens <= 16:
            keep = tokens // 2
            ms = milliseconds(
                lambda p=packed, n=keep: kernels.run(p, p, n, before, settles=False), 36
            )
            found[-1] += f" (+{keep}: {ms:.4f})"
    return "ms  " + "  ".join(found)


def time_mlx(tokens):
    """`mx.fast.gated_delta_update` on the same numbers."""
    _, parts = random_rows(tokens)
    q, k, v, alpha, beta = (mx.array(x.astype(np.float32))[None] for x in parts.values())
    state = mx.zeros((1, SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim))
    mx.eval(q, k, v, alpha, beta, state)
    layers = 36 if tokens < 64 else 2
    return milliseconds(
        lambda: mx.fast.gated_delta_update(q, k, v, alpha, beta, state), layers, repeats=3
    )


def random_block(*, by_kernels):
    """A layer of published sizes in bfloat16."""
    rng = np.random.default_rng(1)
    width = SHAPE.value_heads * SHAPE.value_dim

    def weight(*shape):
        values = rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        return mx.array(values).astype(mx.bfloat16)

    weights = DeltaWeights(
        qkv=weight(SHAPE.channels, HIDDEN),
        z=weight(width, HIDDEN),
        b=weight(SHAPE.value_heads, HIDDEN),
        a=weight(SHAPE.value_heads, HIDDEN),
        conv=weight(SHAPE.channels, 1, SHAPE.kernel),
        a_log=mx.array(np.log(rng.uniform(0.3, 3, SHAPE.value_heads)).astype(np.float32)),
        dt_bias=mx.array(rng.standard_normal(SHAPE.value_heads).astype(np.float32) - 3),
        norm=mx.ones((SHAPE.value_dim,)),
        out=weight(HIDDEN, width),
    )
    make = gated_delta.delta_kernels
    if not by_kernels:
        gated_delta.delta_kernels = lambda sizes: None
    try:
        return GatedDelta(weights, SHAPE, 1e-6)
    finally:
        gated_delta.delta_kernels = make


class Rig:
    """A layer with a state of its own."""

    def __init__(self, *, by_kernels):
        self.layer = random_block(by_kernels=by_kernels)
        heads = (SHAPE.key_heads, SHAPE.groups, SHAPE.key_dim, SHAPE.value_dim)
        self.state = RecurrentRows(1, heads)
        self.window = RowWindow(SHAPE.kernel - 1, SHAPE.channels, mx.bfloat16)

    def run(self, x, keep=None):
        """Rows through the layer; committed where `keep` says how many."""
        y = self.layer(x, self.window, self.state, 0)
        if keep is not None:
            self.state.roll_back(keep)
            self.window.roll_back(keep)
        return y

    def round_ms(self, tokens):
        """A forward that keeps half its rows, again and again, one layer deep."""
        x = mx.random.normal((tokens, HIDDEN)).astype(mx.bfloat16)
        keep = tokens if tokens > 64 else max(1, tokens // 2)
        mx.eval(x)
        return milliseconds(lambda: self.run(x, keep), layers_for(tokens))


def host_ms(rig, tokens=8):
    """Ms of Python to build one layer and commit it, nothing evaluated in between."""
    x = mx.zeros((tokens, HIDDEN), dtype=mx.bfloat16)
    mx.eval(rig.run(x, 1))
    start = time.perf_counter()
    ys = [rig.run(x, 1) for _ in range(100)]
    spent = (time.perf_counter() - start) * 10
    mx.eval(ys)
    return f"{spent:.4f} ms per layer to build"


def block_errors(kernel_rig, plain_rig):
    """How far both forms of the block are apart, over rounds with rejected rows."""
    rng = np.random.default_rng(5)
    apart = []
    for tokens, keep in ((100, 100), (8, 3), (8, 8), (8, 1), (70, 70), (1, 1), (16, 9), (5, 2)):
        x = mx.array(rng.standard_normal((tokens, HIDDEN)).astype(np.float32)).astype(mx.bfloat16)
        ys = [np.array(rig.run(x, keep).astype(mx.float32)) for rig in (kernel_rig, plain_rig)]
        apart.append(f"{np.abs(ys[0] - ys[1]).max() / np.abs(ys[1]).max():.1e}")
    states = [np.array(rig.state.states) for rig in (kernel_rig, plain_rig)]
    return f"relative {apart}  state {np.abs(states[0] - states[1]).max():.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    report = Report(args.out, args.seconds)
    report.line(f"device {mx.default_device()}  language {device_language()}  mlx {mx.__version__}")
    chosen = delta_kernel.delta_kernels(sizes_of())
    report.line(f"chosen {sizes_of()}  usable {chosen is not None}")
    made = []

    def make(lanes, columns):
        made.append(DeltaKernels(sizes_of(lanes, columns), device_language()))
        return check_kernels(made[-1], 2) + "  " + check_kernels(made[-1], 33)

    for lanes, columns in LAYOUTS:
        made.clear()
        report.attempt(f"rows {lanes}x{columns} errors", lambda n=lanes, c=columns: make(n, c))
        report.attempt(f"rows {lanes}x{columns}", lambda: time_kernels(made[0]))
    rigs = {}

    def block(name):
        rigs[name] = Rig(by_kernels=name == "kernels")
        return host_ms(rigs[name])

    for name in ("kernels", "matrix form"):
        report.attempt(f"block by {name}, host", lambda n=name: block(n))
        for tokens in TOKENS:
            report.attempt(
                f"block by {name}, {tokens} tokens",
                lambda n=name, t=tokens: f"{rigs[n].round_ms(t):.4f} ms",
            )
    report.attempt(
        "kernels against matrix form",
        lambda: block_errors(Rig(by_kernels=True), Rig(by_kernels=False)),
    )
    for tokens in TOKENS[:-1]:
        name = f"mx.fast.gated_delta_update, {tokens}"
        report.attempt(name, lambda t=tokens: f"{time_mlx(t):.4f} ms")


if __name__ == "__main__":
    main()
