"""Text of the Gated DeltaNet kernels: three bodies in the common part of CUDA and Metal.

Owns the layout of a packed row and what one thread does. Does not know arrays, launches or states.
A layer's rows take three launches: `PREPARE` makes packed rows of the projections (convolution,
silu, unit length, gates), `ROWS` runs the delta rule over them, `FINISH` norms and gates.

A packed row is float32 [W]: q [Hk Dk] | k [Hk Dk] | v [Hv Dv] | per value head alpha, beta, k.q, 0.
W is a multiple of 4 floats, so that a thread reads four numbers at once.

Invariants: the text is the same for both languages but for the words in `_WORDS`. A row is computed
from its own numbers and the state before it by one sequence of roundings, whatever the rows around
it, so R rows at once, R rows one by one and rows replayed later give the same bits.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), the recurrence; own kernels.
"""

from dataclasses import dataclass
from typing import Final

WARP: Final = 32  # threads that exchange numbers without memory, on both makers' devices
GATES: Final = 4  # floats of gates per value head in a packed row

#: What the languages call the same things.
_WORDS: Final = {
    "cuda": """
  #define DEVICE
  #define LANE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
  const int thread_x = threadIdx.x, block_x = blockIdx.x, block_y = blockIdx.y;
""",
    "metal": """
  #define DEVICE device
  #define LANE_XOR(x, mask) simd_shuffle_xor(x, mask)
  const int thread_x = thread_position_in_threadgroup.x;
  const int block_x = threadgroup_position_in_grid.x, block_y = threadgroup_position_in_grid.y;
""",
}

#: One warp per row and head; grid (warps of a row, R). Key heads come first, then value heads.
_PREPARE: Final = """
  const int lane = thread_x % 32, item = block_x * WARPS + thread_x / 32, row = block_y;
  if (item >= HK + HV) return;
  const int values = 2 * HK * DK, gates = values + HV * DV;
  if (item < HK) {
    float q[(DK + 31) / 32], k[(DK + 31) / 32];
    float qq = 0.0f, kk = 0.0f, kq = 0.0f;
    for (int i = 0; i < (DK + 31) / 32; ++i) {
      const int at = i * 32 + lane;
      q[i] = 0.0f;
      k[i] = 0.0f;
      if (at < DK) {
        for (int tap = 0; tap < TAPS; ++tap) {
          const int from = (row + tap) * C + item * DK + at, weight = tap * C + item * DK + at;
          q[i] = fma(float(padded[from]), taps[weight], q[i]);
          k[i] = fma(float(padded[from + HK * DK]), taps[weight + HK * DK], k[i]);
        }
        q[i] = q[i] / (1.0f + exp(-q[i]));
        k[i] = k[i] / (1.0f + exp(-k[i]));
      }
      qq = fma(q[i], q[i], qq);
      kk = fma(k[i], k[i], kk);
      kq = fma(k[i], q[i], kq);
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      qq += LANE_XOR(qq, mask);
      kk += LANE_XOR(kk, mask);
      kq += LANE_XOR(kq, mask);
    }
    const float short_q = 1.0f / sqrt(qq + UNIT_EPS), short_k = 1.0f / sqrt(kk + UNIT_EPS);
    for (int i = 0; i < (DK + 31) / 32; ++i) {
      const int at = i * 32 + lane;
      if (at < DK) {
        packed[row * W + item * DK + at] = q[i] * short_q;
        packed[row * W + HK * DK + item * DK + at] = k[i] * short_k;
      }
    }
    if (lane < G) packed[row * W + gates + (item * G + lane) * 4 + 2] = kq * short_q * short_k;
  } else {
    const int head = item - HK;
    for (int at = lane; at < DV; at += 32) {
      const int channel = values + head * DV + at;
      float v = 0.0f;
      for (int tap = 0; tap < TAPS; ++tap) {
        v = fma(float(padded[(row + tap) * C + channel]), taps[tap * C + channel], v);
      }
      packed[row * W + channel] = v / (1.0f + exp(-v));
    }
    if (lane == 0) {
      const int from = row * PROJECTED + C + HV * DV + head;
      const float b = float(projected[from]), a = float(projected[from + HV]) + dt_bias[head];
      // log(1 + e^a) without losing a small e^a to the 1 it is added to.
      const float small = exp(a > 0.0f ? -a : a), sum = 1.0f + small;
      const float tail = sum == 1.0f ? small : log(sum) * (small / (sum - 1.0f));
      const float step = (a > 0.0f ? a : 0.0f) + tail;
      packed[row * W + gates + head * 4] = exp(rate[head] * step);
      packed[row * W + gates + head * 4 + 1] = 1.0f / (1.0f + exp(-b));
      packed[row * W + gates + head * 4 + 3] = 0.0f;
    }
  }
"""

#: LANES threads per value column hold its DK numbers; grid (columns, Hv). counts: how many of the
#: old rows are replayed, how many new ones follow, after how many of both the state is written.
_ROWS: Final = """
  const int lane = thread_x % LANES, head = block_y;
  const int column = block_x * COLUMNS + thread_x / LANES;
  const int keep = counts[0], total = counts[0] + counts[1], write_at = counts[2];
  const int queries = (head / G) * DK + lane * 4, keys = queries + HK * DK;
  const int values = 2 * HK * DK + head * DV + column;
  const int gates = 2 * HK * DK + HV * DV + head * 4;
  const int corner = (head * DK + lane * 4) * DV + column;
  float4 S[P], k[P], q[P], next_k[P], next_q[P];
  float4 gate, next_gate;
  float v, next_v;

  #define FETCH(t) { \\
    const DEVICE float* at = (t) < keep ? old + (t) * W : fresh + ((t) - keep) * W; \\
    for (int i = 0; i < P; ++i) { \\
      next_k[i] = *(const DEVICE float4*)(at + keys + i * LANES * 4); \\
      next_q[i] = *(const DEVICE float4*)(at + queries + i * LANES * 4); \\
    } \\
    next_gate = *(const DEVICE float4*)(at + gates); \\
    next_v = at[values]; \\
  }
  #define STORE() { \\
    for (int i = 0; i < P; ++i) { \\
      const int to = corner + i * LANES * 4 * DV; \\
      after[to] = S[i].x; \\
      after[to + DV] = S[i].y; \\
      after[to + 2 * DV] = S[i].z; \\
      after[to + 3 * DV] = S[i].w; \\
    } \\
  }

  for (int i = 0; i < P; ++i) {
    const int from = corner + i * LANES * 4 * DV;
    S[i].x = before[from];
    S[i].y = before[from + DV];
    S[i].z = before[from + 2 * DV];
    S[i].w = before[from + 3 * DV];
  }
  if (total > 0) FETCH(0)
  for (int t = 0; t < total; ++t) {
    if (t == write_at) STORE()
    for (int i = 0; i < P; ++i) {
      k[i] = next_k[i];
      q[i] = next_q[i];
    }
    gate = next_gate;
    v = next_v;
    if (t + 1 < total) FETCH(t + 1)
    float4 read4 = {0.0f, 0.0f, 0.0f, 0.0f}, seen4 = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < P; ++i) {
      read4.x = fma(S[i].x, k[i].x, read4.x);
      read4.y = fma(S[i].y, k[i].y, read4.y);
      read4.z = fma(S[i].z, k[i].z, read4.z);
      read4.w = fma(S[i].w, k[i].w, read4.w);
      seen4.x = fma(S[i].x, q[i].x, seen4.x);
      seen4.y = fma(S[i].y, q[i].y, seen4.y);
      seen4.z = fma(S[i].z, q[i].z, seen4.z);
      seen4.w = fma(S[i].w, q[i].w, seen4.w);
    }
    float read = (read4.x + read4.y) + (read4.z + read4.w);
    float seen = (seen4.x + seen4.y) + (seen4.z + seen4.w);
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
      read += LANE_XOR(read, mask);
      seen += LANE_XOR(seen, mask);
    }
    // The state is read before it fades: what a row sees of it fades with it.
    const float alpha = gate.x, error = gate.y * fma(-alpha, read, v);
    for (int i = 0; i < P; ++i) {
      S[i].x = fma(error, k[i].x, alpha * S[i].x);
      S[i].y = fma(error, k[i].y, alpha * S[i].y);
      S[i].z = fma(error, k[i].z, alpha * S[i].z);
      S[i].w = fma(error, k[i].w, alpha * S[i].w);
    }
    if (lane == 0 && t >= keep) {
      out[((t - keep) * HV + head) * DV + column] = fma(error, gate.z, alpha * seen);
    }
  }
  if (write_at == total) STORE()
"""

#: One warp per row and value head; grid (warps of a row, R).
_FINISH: Final = """
  const int lane = thread_x % 32, head = block_x * WARPS + thread_x / 32, row = block_y;
  if (head >= HV) return;
  const int from = (row * HV + head) * DV;
  float total = 0.0f;
  for (int at = lane; at < DV; at += 32) total = fma(out[from + at], out[from + at], total);
  for (int mask = 16; mask > 0; mask /= 2) total += LANE_XOR(total, mask);
  const float short_out = 1.0f / sqrt(total + FLOOR);
  for (int at = lane; at < DV; at += 32) {
    const float z = float(projected[row * PROJECTED + C + head * DV + at]);
    const float sigmoid = 1.0f / (1.0f + exp(-z));
    const float gate = IS_SILU ? z * sigmoid : sigmoid;
    normed[from + at] = T(out[from + at] * short_out * norm[at] * gate);
  }
"""


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Constants of the three kernels.

    Attributes:
        key_heads: Hk.
        groups: value heads per key head, at most 32.
        key_dim: Dk, a multiple of 4 `lanes`.
        value_dim: Dv, a multiple of 4 and of `columns`.
        taps: rows of the convolution.
        lanes: threads per value column, a power of two up to 32.
        columns: value columns per block; lanes * columns is a multiple of 32.
        is_silu: whether the output gate is z sigmoid(z) rather than sigmoid(z).
        unit_eps: inside the sum of squares of q and k.
        floor: inside the sum of squares of an output of unscaled q.
    """

    key_heads: int
    groups: int
    key_dim: int
    value_dim: int
    taps: int
    lanes: int
    columns: int
    is_silu: bool
    unit_eps: float
    floor: float

    @property
    def value_heads(self) -> int:
        """Hv."""
        return self.key_heads * self.groups

    @property
    def channels(self) -> int:
        """Width of the convolved rows, C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Width of all projections of a row: C, z, b and a."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def packed(self) -> int:
        """Floats of a packed row, W."""
        return self.channels + GATES * self.value_heads


def kernel_source(body: str, sizes: KernelSizes, language: str, warps: int = 4) -> str:
    """The text of one kernel.

    Args:
        body: "prepare", "rows" or "finish".
        sizes: its constants.
        language: "cuda" or "metal".
        warps: of one block of `prepare` and `finish`.
    """
    whole = {
        "HK": sizes.key_heads,
        "HV": sizes.value_heads,
        "G": sizes.groups,
        "DK": sizes.key_dim,
        "DV": sizes.value_dim,
        "TAPS": sizes.taps,
        "C": sizes.channels,
        "PROJECTED": sizes.projected,
        "W": sizes.packed,
        "LANES": sizes.lanes,
        "COLUMNS": sizes.columns,
        "P": sizes.key_dim // (4 * sizes.lanes),
        "WARPS": warps,
        "IS_SILU": int(sizes.is_silu),
    }
    lines = [f"  constexpr int {name} = {value};" for name, value in whole.items()]
    lines.append(f"  constexpr float UNIT_EPS = {sizes.unit_eps:.9e}f, FLOOR = {sizes.floor:.9e}f;")
    text = {"prepare": _PREPARE, "rows": _ROWS, "finish": _FINISH}[body]
    return _WORDS[language] + "\n".join(lines) + text
