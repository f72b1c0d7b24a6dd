"""What a request may ask of decoding: validated once, honoured in full or refused by name.

Owns the parameters, their ranges and the seeds of further completions. Does not know messages,
logits or sessions: the wire's `Sampling` has the same field names, and `of` and `as_fields` go
between the two.
Invariant: a `SamplingParams` that exists is honoured in full by target and coordinator.
"""

import secrets
from dataclasses import asdict, dataclass, fields
from typing import Final, Protocol, TypedDict

from common.errors import BadRequest

MAX_TOKENS_LIMIT: Final = 1_000_000
MAX_SEED: Final = 2**63 - 1  # fits msgpack's signed integers in every language
MAX_TOKEN_ID: Final = 2**31 - 1
_MASK: Final = 2**64 - 1
DRAWN_SEED_BITS: Final = 31  # short enough to type again
ACCEPTANCES: Final = ("exact", "residual", "typical", "cascade")
LOSSY_ACCEPTANCES: Final = ("typical", "cascade")  # the output is not the target's own
LEAST_TEMPERATURE: Final = 1e-6  # scores divided by much less are infinite, and all best
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_BIASES: Final = 1024
MAX_TOP_LOGPROBS: Final = 20


class SamplingFields(TypedDict):
    """The fields by name, as the wire's `Sampling` takes them."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    acceptance: str
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: tuple[int, ...]
    bias_values: tuple[float, ...]
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    logprobs: int
    typical_delta: float
    typical_epsilon: float
    cascade_alpha: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    Raises:
        BadRequest: a value out of its range.
    """

    max_tokens: int = 256  # 1..1,000,000 generated tokens
    temperature: float = 0.0  # 0 is greedy; above it tokens are drawn with noise keyed by the seed
    top_p: float = 1.0  # (0, 1]; no effect on greedy decoding
    top_k: int = 0  # 0 is off; no effect on greedy decoding
    seed: int = 0  # 0..2^63-1; greedy decoding does not use it
    acceptance: str = "exact"  # what becomes of drafts above temperature 0: one of ACCEPTANCES
    ignore_eos: bool = False  # go on to max_tokens past the end-of-text token
    min_p: float = 0.0  # [0, 1]: least probability, as a share of the best; 0 is off
    repetition_penalty: float = 1.0  # 0.001..1000; 1 is off
    presence_penalty: float = 0.0  # -2..2; 0 is off
    frequency_penalty: float = 0.0  # -2..2; 0 is off
    bias_ids: tuple[int, ...] = ()  # at most 1,024 ids whose scores are changed ..
    bias_values: tuple[float, ...] = ()  # .. by so much, -100..100 each
    stop_ids: tuple[int, ...] = ()  # at most 16 ids that end the text beside the model's own
    stop: tuple[str, ...] = ()  # at most 16 texts of 1..1,024 characters that end the reply
    logprobs: int = -1  # -1 is off; n in 0..20: of the chosen token and of the n most likely
    typical_delta: float = 0.2  # of acceptance "typical", above 0
    typical_epsilon: float = 1.0  # of acceptance "typical", (0, 1]
    cascade_alpha: float = 0.95  # of acceptance "cascade", [0, 1]

    def __post_init__(self) -> None:
        """Check every value."""
        _whole("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _number("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise BadRequest(
                f"temperature: {self.temperature!r}; it must be 0, which is greedy, or at least "
                f"{LEAST_TEMPERATURE:g}"
            )
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
        self._check_scores()
        self._check_stops()

    def _check_scores(self) -> None:
        """What changes the scores or which of them are kept."""
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("typical_delta", self.typical_delta, 1e-9, 1e9)
        _number("typical_epsilon", self.typical_epsilon, 1e-9, 1.0)
        _number("cascade_alpha", self.cascade_alpha, 0.0, 1.0)
        _whole("logprobs", self.logprobs, -1, MAX_TOP_LOGPROBS)
        _items("bias_ids", self.bias_ids, MAX_BIASES)
        for token in self.bias_ids:
            _whole("bias_ids", token, 0, MAX_TOKEN_ID)
        if len(self.bias_values) != len(self.bias_ids) or len(set(self.bias_ids)) != len(
            self.bias_ids
        ):
            raise BadRequest(
                f"bias_values: {len(self.bias_values)} for {len(self.bias_ids)} bias_ids; "
                "there must be one for each, and no id twice"
            )
        for value in self.bias_values:
            _number("bias_values", value, -100.0, 100.0)

    def _check_stops(self) -> None:
        """What ends a text."""
        _items("stop_ids", self.stop_ids, MAX_STOPS)
        for token in self.stop_ids:
            _whole("stop_ids", token, 0, MAX_TOKEN_ID)
        _items("stop", self.stop, MAX_STOPS)
        for text in self.stop:
            if type(text) is not str or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise BadRequest(f"stop: {text!r:.40}; a text of 1..{MAX_STOP_CHARS} characters")

    @classmethod
    def of(cls, other: object) -> "SamplingParams":
        """Validate any object with the same fields, such as the wire's `Sampling`."""
        return cls(**{field.name: getattr(other, field.name) for field in fields(cls)})

    def as_fields(self) -> SamplingFields:
        """The fields by name: `Sampling(**params.as_fields())`."""
        made: SamplingFields = asdict(self)  # type: ignore[assignment]  # same names and types
        return made


def _items(name: str, value: object, most: int) -> None:
    if type(value) is not tuple or len(value) > most:
        raise BadRequest(f"{name}: {value!r:.40}; it must be a tuple of at most {most} items")


class Decoding(Protocol):
    """What tells a lossy request."""

    @property
    def temperature(self) -> float: ...  # noqa: D102

    @property
    def acceptance(self) -> str: ...  # noqa: D102


def is_lossy(sampling: Decoding) -> bool:
    """Whether drafts change what comes out; greedy decoding keeps to the target in every mode."""
    return sampling.temperature > 0 and sampling.acceptance in LOSSY_ACCEPTANCES


def derived_seed(seed: int, completion: int) -> int:
    """The seed of completion 0, 1, .. of one request: the first has the request's own.

    Seeds of one request differ, and so do their noises: splitmix64, Steele et al. 2014.

    >>> derived_seed(7, 0)
    7
    """
    if completion == 0:
        return seed
    mixed = (seed + completion * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) & MAX_SEED


def draw_seed() -> int:
    """Draw a seed for a request that names none; it is reported with the reply."""
    return secrets.randbits(DRAWN_SEED_BITS)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name}: {value!r}; it must be a whole number in {low}..{high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise BadRequest(f"{name}: {value!r}; it must be a number in {low:g}..{high:g}")
