"""What a model's figures decide: given numbers, and nothing that depends on this machine."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.support.results import row
from twinkle.bench import worth
from twinkle.bench.model_view import mapping_lines, parts
from twinkle.bench.results import Result
from twinkle.bench.worth import AGAIN, FASTER, NOISE, NOT_CALLED, NOT_MEASURED, SLOWER, TOO_FEW, conclude
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice
from twinkle.layout import laid_out, plain

NORM = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"
ROTARY = "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb"
CHAIN = DEFAULT_KERNEL_CONFIG[NORM].backends  # npu, triton, liger, torch


def about(name: str, median: float, half: float | None = 10.0) -> dict[str, float]:
    """The figures of a difference, ``half`` to either side."""
    found = {f"{name}_us": median}
    return found if half is None else found | {f"{name}_low_us": median - half, f"{name}_high_us": median + half}


def entry(
    who: str, saved: float, *, target: str = NORM, half: float | None = 10.0, gain: float | None = None, **fields: Any
) -> Result:
    """A row of an entry: what the default takes, or with a gain over that."""
    more = {} if gain is None else about("gain", gain, half)
    figures = {"calls": 9.0, "calls_left": 0.0, **about("saved", saved, half), **more, **fields.pop("figures", {})}
    return row(who, 100 - saved / 1e3, f"{worth.CASE}{target}", figures=figures, **fields)


def originals(noise: float | None = 40.0) -> list[Result]:
    figures = {} if noise is None else {"saved_us": 0.0, "saved_low_us": -noise, "saved_high_us": noise / 2}
    return [row("hf", 100.0, worth.ORIGINAL_CASE), row(AGAIN, 100.0, worth.ORIGINAL_CASE, figures=figures)]


def verdict(one: Result, noise: float | None = 40.0) -> str:
    return conclude([*originals(noise), one]).verdicts[one.case, one.who]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_an_interval_leaves_out_what_chance_alone_puts_there() -> None:
    assert worth.interval(range(7)) is None
    assert worth.interval([5, 1, 2, 3, 4, 0, 7, 6]) == (0, 7)
    assert worth.interval(range(20)) == (3, 16)
    assert worth.interval([]) is None
    # For every number of rounds: of all ways to fall on either side of the median, at most one in a hundred misses it.
    for n in range(8, 15):
        low, high = worth.interval(range(n))  # type: ignore[misc]
        sides = [sum(side) for side in itertools.product((0, 1), repeat=n)]  # how many lie below the median
        missed = sum(below <= low or below > high for below in sides)
        narrower = sum(below <= low + 1 or below > high - 1 for below in sides)
        assert missed / len(sides) <= 0.01 < narrower / len(sides)


def test_a_difference_is_taken_round_by_round() -> None:
    slow = [100.0 + drift for drift in range(0, 160, 10)]  # the machine gets slower all the time
    fast = [ms - 2 for ms in slow]
    assert worth.difference(slow, fast, "saved") == {"saved_us": 2e3, "saved_low_us": 2e3, "saved_high_us": 2e3}
    assert worth.difference(slow[:3], fast[:3], "gain") == {"gain_us": 2e3}


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "half", "said"),
    [
        (100, 10, FASTER),
        (100, 110, NOISE),  # may be nothing
        (39, 10, NOISE),  # no more than the original differs from itself
        (0, 10, NOISE),
        (-39, 10, NOISE),
        (-100, 10, SLOWER),
        (-100, 110, NOISE),
        (100, None, TOO_FEW),
    ],
)
def test_only_what_is_more_than_the_noise_counts(saved: float, half: float | None, said: str) -> None:
    assert verdict(entry("torch", saved, half=half)) == said


def test_the_noise_is_the_most_that_the_original_may_differ_from_itself_by() -> None:
    assert conclude(originals(40.0)).noise_us == 40.0
    assert conclude(originals(None)).noise_us is None
    assert verdict(entry("torch", 100), noise=None) == TOO_FEW


def test_a_kernel_that_was_never_called_is_not_faster_but_to_be_asked_costs_time() -> None:
    idle = {"calls": 0.0, "calls_left": 9.0}
    assert verdict(entry("torch", 100, figures=idle)) == verdict(entry("torch", -1, figures=idle)) == NOT_CALLED
    assert verdict(entry("torch", -100, figures=idle)) == SLOWER
    assert verdict(entry("torch", 100, figures={"calls": 0.0})) == FASTER  # calls within a compiled one aren't counted


def test_what_was_not_measured_has_no_other_verdict() -> None:
    assert verdict(Result(f"model/{NORM}", "torch", "9x9", "float32", note="wrong: its loss is 1")) == NOT_MEASURED


# --- another order ----------------------------------------------------------------------------------------------------


def test_a_faster_backend_goes_before_what_the_default_mapping_takes() -> None:
    usual = entry("triton", 100, chosen=True)
    found = conclude([*originals(), usual, entry("liger", 300, gain=200), entry("torch", 200, gain=100)])
    assert found.chains == {NORM: ("rms_norm", ("npu", "liger", "triton", "torch"))}
    assert not found.without
    assert found.to_dict()["mapping"] == {NORM: {"op": "rms_norm", "backends": ["npu", "liger", "triton", "torch"]}}
    assert {"case": f"model/{NORM}", "who": "liger", "verdict": FASTER} in found.to_dict()["verdicts"]


@pytest.mark.parametrize("gain", [39, -200])
def test_an_order_stays_where_another_is_not_faster_by_more_than_the_noise(gain: float) -> None:
    found = conclude([*originals(), entry("triton", 100, chosen=True), entry("liger", 100 + gain, gain=gain)])
    assert not found.chains and not found.without


def test_an_entry_that_makes_the_step_slower_is_better_left_out() -> None:
    slow = entry("torch", -100, target=ROTARY, chosen=True)
    assert conclude([*originals(), slow]).without == [ROTARY]
    less_slow = entry("inductor", -60, target=ROTARY, gain=40)
    assert conclude([*originals(), slow, less_slow]).without == [ROTARY]
    fast = entry("inductor", 100, target=ROTARY, gain=200)
    found = conclude([*originals(), slow, fast])
    assert found.chains == {ROTARY: ("rotary", ("npu", "triton", "liger", "inductor", "torch"))} and not found.without


def test_a_backend_is_proposed_where_the_default_mapping_takes_none() -> None:
    found = conclude([*originals(), entry("inductor", 100)])
    assert found.chains == {NORM: ("rms_norm", (*CHAIN, "inductor"))}
    assert not conclude([*originals(), entry("inductor", 10)]).chains


@pytest.mark.parametrize(
    ("best", "others", "expected"),
    [
        ("torch", {"triton"}, ("npu", "torch", "triton", "liger")),
        ("mine", {"triton", "torch"}, ("npu", "mine", "triton", "liger", "torch")),
        ("mine", set(), (*CHAIN, "mine")),
        ("torch", {"triton", "torch"}, ("npu", "torch", "triton", "liger")),
        ("triton", {"triton", "torch"}, ("npu", "triton", "liger")),  # the second only made it slower
        ("triton", {"mine"}, CHAIN),
    ],
)
def test_the_rest_of_a_chain_keeps_its_order(best: str, others: set[str], expected: tuple[str, ...]) -> None:
    assert worth.reordered(CHAIN, best, others) == expected


def test_the_best_backend_of_an_opt_in_entry_is_proposed_before_the_others() -> None:
    rows = [entry("triton", 100, target="fused_ce"), entry("torch", 300, target="fused_ce")]
    assert conclude([*originals(), *rows]).chains == {
        "fused_ce": ("causal_lm_loss", ("torch", "triton", "liger", "inductor"))
    }


def test_what_takes_no_less_time_but_less_memory_is_worth_that() -> None:
    def held(gigabytes: float) -> dict[str, float]:
        return {"step_memory_gb": gigabytes}

    original, again = originals()
    original.figures.update(held(1.0))
    for gigabytes, said in ((0.97, worth.LIGHTER), (0.985, NOISE), (1.5, NOISE)):
        light = entry("torch", 0, figures=held(gigabytes), chosen=True)
        assert conclude([original, again, light]).verdicts == {(light.case, "torch"): said}
    slow = entry("torch", -500, figures=held(0.8), chosen=True)
    found = conclude([original, again, slow])
    assert found.verdicts == {(slow.case, "torch"): SLOWER} and not found.without
    text = shown([original, again, entry("torch", 0, figures=held(0.75), chosen=True)])
    assert "  25% less memory\n" in text and "Not worth it" not in text


# --- what people see --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 80, 300])
def test_the_mapping_can_be_pasted_at_any_width(width: int) -> None:
    found = worth.Conclusions(
        chains={NORM: ("rms_norm", ("npu", "mine", "torch")), "sdpa": ("sdpa_attention", ("npu",))}
    )
    for without in ([], [ROTARY]):
        for chains in (found.chains, {}):
            lines = mapping_lines(worth.Conclusions(chains=chains, without=without), width)
            assert not [line for line in lines if len(line) > width and len(line.split()) > 1]
            names: dict[str, Any] = {}
            exec("\n".join(lines), names)
            changed = {target: KernelChoice(*choice) for target, choice in chains.items()}
            expected = {**DEFAULT_KERNEL_CONFIG, **changed}
            assert names["mapping"] == {key: value for key, value in expected.items() if key not in without}


def shown(results: list[Result], width: int = 200) -> str:
    return plain(laid_out(parts(results, conclude(results), enough_s=90.0), width))


def test_it_says_what_is_worth_it_and_what_is_not() -> None:
    held = {"step_memory_gb": 0.010}
    rows = [
        row("hf", 100.0, worth.ORIGINAL_CASE, figures={"step_memory_gb": 0.012, "tokens_per_s": 5000.0}),
        originals()[1],
        entry("triton", 9000, half=900, chosen=True, figures=held),
        entry("liger", -400, target=ROTARY, chosen=True, note="3 calls a step left to the original: too small"),
        entry("torch", 20, target=ROTARY, gain=420),
        row("default", 90.0, worth.TOGETHER, chosen=True, figures={"calls": 18.0, **about("saved", 10e3)}),
    ]
    text = shown(rows)
    assert "A step of the original takes 100 ms (100 .. 100), 5,000 tokens/s. It holds 12.0 MB beyond" in text
    assert "it differs from itself by up to 40.0 us (0.0%). Nothing smaller counts." in text
    (line,) = (line for line in text.splitlines() if "qwen3.Qwen3RMSNorm " in line)
    cells = ["qwen3.Qwen3RMSNorm", "triton*", "9", "9000 (8100 .. 9900)", "1000 (900 .. 1100)", "-2.00", "9.0% faster"]
    assert re.split(" {2,}", line) == cells
    assert "not worth it (0.4% slower)" in text and "not worth it (noise)" in text
    assert "qwen3.apply_rotary_pos_emb, liger: 3 calls a step left to the original: too small" in text
    assert "All together: a step takes 90.0 ms: 1.11x as fast.\n" in text
    assert "Not worth it here, as far as this run can tell: qwen3.apply_rotary_pos_emb." in text
    assert f'mapping.pop("{ROTARY}")' in text and "something else is at work" not in text


def test_it_says_that_no_order_was_compared_or_that_none_is_better() -> None:
    usual = entry("triton", 100, chosen=True)
    assert "No order of backends was compared: for each entry only one can run here" in shown([*originals(), usual])
    both = [*originals(), usual, entry("liger", 90, gain=-10)]
    assert "No other backend is faster than what the default mapping takes" in shown(both)


def test_it_says_how_to_get_enough_rounds_and_a_quieter_run() -> None:
    total = row("default", 90.0, worth.TOGETHER, chosen=True, figures={"calls": 1.0, **about("saved", 100, None)})
    text = shown([*originals(None), entry("triton", 100, half=None, chosen=True), total])
    assert "All together: a step takes 90.0 ms: too few rounds to tell." in text and "confidence" not in text
    assert "3 rounds are too few to tell anything. It takes 8: try --budget 90." in text
    assert "too few rounds to tell" in text and "No order" not in text and "No other" not in text
    assert "something else is at work on this machine" in shown([*originals(6e3), entry("triton", 100, chosen=True)])


def test_a_total_within_the_noise_is_called_so() -> None:
    total = row("default", 99.99, worth.TOGETHER, chosen=True, figures={"calls": 1.0, **about("saved", 10)})
    assert "1.00x as fast (within the noise)." in shown([*originals(), entry("triton", 1, chosen=True), total])
