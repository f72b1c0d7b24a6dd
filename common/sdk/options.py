"""What a caller may ask for beside the prompt, and the sampling parameters it comes to.

Owns the names and defaults of the SDK's options. Does not know their ranges (`common.sampling`) or
messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from common.errors import BadRequest
from common.sampling import SamplingParams, derived_seed, draw_seed


class Options(TypedDict, total=False):
    """Options of `generate` and `stream`; ranges and meanings as in `common.sampling`."""

    max_tokens: int  # most tokens to generate; 256
    temperature: float  # 0, the default, is greedy
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None  # token id -> what is added to its score
    seed: int | None  # None: one is drawn and reported in the reply
    acceptance: str  # "exact", "residual", or one of the lossy "typical", "cascade"
    typical_delta: float
    typical_epsilon: float
    cascade_alpha: float
    stop: str | Sequence[str] | None  # texts that end the reply and are no part of it
    stop_ids: Sequence[int] | None  # token ids that end it beside the model's own
    ignore_eos: bool  # go on past the model's own end-of-text token
    logprobs: int | None  # of each token, and of so many of the most likely ones
    draft: bool  # False: the same stack, nothing drafted
    timeout_s: float | None  # deadline of the whole request; None: none
    resume_s: float  # how long to try to go on after the connection broke; 10; 0: not at all
    messages: Sequence[Mapping[str, Any]] | None  # a chat, in place of a prompt
    tools: Sequence[Mapping[str, Any]] | None  # passed through to the chat template
    template_kwargs: Mapping[str, Any] | None  # more names for the chat template
    share_scope: str  # of whoever a service asks for: kept prefixes are shared within it only
    allow_special: bool  # special tokens written out in text become those tokens


#: Options that are passed on as they are.
_PLAIN = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "acceptance",
    "typical_delta",
    "typical_epsilon",
    "cascade_alpha",
    "ignore_eos",
)


def sampling_of(options: Options) -> SamplingParams:
    """Check the options that change decoding.

    Raises:
        BadRequest: an unknown option, or a value out of its range.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise BadRequest(f"{unknown[0]}: no such option; there are {', '.join(known_options())}")
    if type(options.get("draft", True)) is not bool:
        raise BadRequest(f"draft: {options['draft']!r:.40}; it must be true or false")
    plain: dict[str, Any] = {name: options[name] for name in _PLAIN if name in options}  # type: ignore[literal-required]
    seed, logprobs, bias = options.get("seed"), options.get("logprobs"), _bias_of(options)
    stop = options.get("stop")
    return SamplingParams(
        **plain,
        seed=draw_seed() if seed is None else seed,
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
        stop=(stop,) if isinstance(stop, str) else _items("stop", stop),
        stop_ids=_items("stop_ids", options.get("stop_ids")),
        logprobs=-1 if logprobs is None else logprobs,
    )


def options_of_each(n: int, options: Options) -> list[Options]:
    """The options of `n` completions: alike but for their seeds.

    Raises:
        BadRequest: n below 1, or a seed out of its range.
    """
    if type(n) is not int or n < 1:
        raise BadRequest(f"n: {n!r}; it must be a whole number, at least 1")
    seed = sampling_of(options).seed
    return [{**options, "seed": derived_seed(seed, index)} for index in range(n)]


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadRequest(f"{name}: {value!r:.40}; a list is needed")
    return tuple(value)


def _bias_of(options: Options) -> Mapping[int, float]:
    bias: Any = options.get("logit_bias")
    if bias is not None and not isinstance(bias, Mapping):
        raise BadRequest(f"logit_bias: {bias!r:.40}; a mapping of token ids to numbers is needed")
    return bias or {}


def known_options() -> list[str]:
    """Names of all options, sorted."""
    return sorted(Options.__annotations__)
