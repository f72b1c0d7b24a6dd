"""What a request may ask of decoding: validated once, honoured or refused by name.

Owns the parameters, their ranges and the list of what this version honours. Does not know
messages, logits or sessions: the wire's `Sampling` has the same field names, and `of` and
`as_fields` go between the two.
Invariant: a `SamplingParams` that exists is honoured in full by target and coordinator.
"""

import secrets
from dataclasses import asdict, dataclass, fields
from typing import Final, TypedDict

from common.errors import BadRequest, Unsupported

MAX_TOKENS_LIMIT: Final = 1_000_000
MAX_SEED: Final = 2**63 - 1  # fits msgpack's signed integers in every language
DRAWN_SEED_BITS: Final = 31  # short enough to type again
ACCEPTANCES: Final = ("exact", "residual", "typical", "cascade")
HONOURED_ACCEPTANCES: Final = ("exact",)


class SamplingFields(TypedDict):
    """The fields by name, as the wire's `Sampling` takes them."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    acceptance: str
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    Raises:
        BadRequest: a value out of its range.
        Unsupported: a known value that this version does not honour.
    """

    max_tokens: int = 256  # 1..1,000,000 generated tokens
    temperature: float = 0.0  # 0 is greedy; above it tokens are drawn with noise keyed by the seed
    top_p: float = 1.0  # (0, 1]; no effect on greedy decoding
    top_k: int = 0  # 0 is off; no effect on greedy decoding
    seed: int = 0  # 0..2^63-1; greedy decoding does not use it
    acceptance: str = "exact"
    ignore_eos: bool = False  # go on to max_tokens past the end-of-text token

    def __post_init__(self) -> None:
        """Check every value."""
        _whole("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _whole("seed", self.seed, 0, MAX_SEED)
        if self.top_p == 0:
            raise BadRequest("top_p: 0.0; it must lie in (0, 1]")
        if type(self.ignore_eos) is not bool:
            raise BadRequest(f"ignore_eos: {self.ignore_eos!r}; it must be true or false")
        if self.acceptance not in ACCEPTANCES:
            names = ", ".join(ACCEPTANCES)
            raise BadRequest(f"acceptance: {self.acceptance!r}; choose one of {names}")
        self._refuse_what_is_not_honoured()

    def _refuse_what_is_not_honoured(self) -> None:
        if self.acceptance not in HONOURED_ACCEPTANCES:
            raise Unsupported(
                f"acceptance: {self.acceptance!r} is not supported here; "
                f"supported: {', '.join(HONOURED_ACCEPTANCES)}"
            )

    @classmethod
    def of(cls, other: object) -> "SamplingParams":
        """Validate any object with the same fields, such as the wire's `Sampling`."""
        return cls(**{field.name: getattr(other, field.name) for field in fields(cls)})

    def as_fields(self) -> SamplingFields:
        """The fields by name: `Sampling(**params.as_fields())`."""
        made: SamplingFields = asdict(self)  # type: ignore[assignment]  # same names and types
        return made


def draw_seed() -> int:
    """Draw a seed for a request that names none; it is reported with the reply."""
    return secrets.randbits(DRAWN_SEED_BITS)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name}: {value!r}; it must be a whole number in {low}..{high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise BadRequest(f"{name}: {value!r}; it must be a number in {low:g}..{high:g}")
