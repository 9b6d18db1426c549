"""What the ledger in the repository must say for the course's text to be true."""

import functools

import pytest

from failurelab_course import eras
from failurelab_course.ledger.records import key, read_ledger
from failurelab_course.ledger.tables.machines import MAIN_SHAPE, SIMULATED

LEDGER = eras.root() / "evidence" / "cpu.json"
OURS = "completion_logps"
KINDS = ("off", "reentrant", "non-reentrant")
ELEMENT_0 = "element 0 of tensors does not require grad"
CURES = (
    "enable_input_require_grads before the wrap",
    "enable_input_require_grads after the wrap",
    "forward hook written out",
    "checkpointing before the wrap",
    "use_reentrant=False",
    "prepare_peft",
)
old_and_today = pytest.mark.parametrize("era", ["trl-0.14", "today"])
three_eras = pytest.mark.parametrize("era", ["trl-0.14", "trl-0.15", "today"])


@functools.cache
def records():
    return read_ledger(LEDGER)


def all_of(start, era=None):
    """Return the records whose case starts so."""
    return [made for made in records() if made["case"].startswith(start) and era in (None, made["era"])]


def by_seed(failure, case, era):
    """Return the metrics of a benchmark's runs, by seed."""
    runs = [made for made in all_of(case, era) if (made["failure"], made["case"]) == (failure, case)]
    runs = [made for made in runs if made["source"].startswith("benchmarks/")]
    found = {made["seed"]: made["figures"] for made in runs}
    assert len(found) == len(runs)
    return found


def of_seeds(failure, case, era):
    found = by_seed(failure, case, era)
    assert len(found) >= 3, (failure, case, era)
    return found


def metrics(failure, case, era):
    (only,) = by_seed(failure, case, era).values()
    return only


def test_the_ledger_in_the_repository_is_valid():
    """Every stored record follows the schema, and comes from a CPU."""
    assert {made["tier"] for made in records()} <= {"cpu", "simulated"}
    assert len({key(made) for made in records()}) == len(records()) > 0


# Failures F1, F7 and the healthy ground: gradients and rollouts


@three_eras
@pytest.mark.parametrize("trainer", ["GRPO", "Online DPO"])
def test_the_three_faces_of_the_warning(trainer, era):
    """Harmless, silent, fatal, in the old stacks; each healed by the repair, which leaves the warning; none today."""
    for setup, trainable in (("full", 26), ("embeddings frozen", 25), ("LoRA", 8)):
        found = {kind: metrics("F1", f"{trainer}, {setup}, {kind}", era) for kind in KINDS}
        for kind in KINDS if era == "today" else ("non-reentrant",):
            assert (found[kind]["warnings"], found[kind]["changed"]) == (0, trainable)
        if era == "today":
            continue
        broken, repaired = found["reentrant"], metrics("F1", f"{trainer}, {setup}, reentrant, require_input_grads", era)
        assert broken["changed"] == {"full": 26, "embeddings frozen": 1, "LoRA": 0}[setup]
        assert broken["trainable"] == repaired["changed"] == repaired["trainable"] == trainable
        assert repaired["warnings"] > 0 and (broken["warnings"] > 0 or setup == "LoRA")
        assert (ELEMENT_0 in broken["error"]) == bool(broken["error"]) == (setup == "LoRA")


@pytest.mark.parametrize("era", ["trl-0.14", "trl-0.15", "trl-0.22", "today"])
def test_checkpointing_comes_back_reentrant(era):
    """In trl 0.22 by default, and whatever was asked for; the input that requires grad heals it in every release."""
    kinds = {"default": {"trl-0.22": "reentrant", "today": "non-reentrant"}.get(era, "off")}
    kinds |= {kind: kind for kind in KINDS}
    for asked, kind in kinds.items():
        found = metrics("F1", f"comes back, asked for: {asked}", era)
        kind = "reentrant" if era == "trl-0.22" and asked != "off" else kind
        dead = kind == "reentrant" and era != "today"
        assert (found["in_force"], found["changed"], found["trainable"]) == (kind, 1 if dead else 25, 25)
    cures = {"model.enable_input_require_grads()": True, "gradients.require_input_grads(model)": True}
    for cure, heals in (cures | {"model.config.use_cache = False": era == "today"}).items():
        assert metrics("F1", f"comes back, cure: {cure}", era)["changed"] == (25 if heals else 1)


@pytest.mark.parametrize(
    ("era", "mixed", "equal", "eager"),
    [
        ("trl-0.14", True, False, True),
        ("trl-0.15", True, False, True),
        ("trl-0.14-tf-4.52", False, False, False),
        ("today", True, True, True),
    ],
)
def test_generation_in_training(era, mixed, equal, eager):
    """Checkpointing meets the cache: broken by padding or eager attention in 4.48, never in 4.52, always today."""
    for attention in ("sdpa", "eager"):
        for lengths in ("mixed", "equal"):

            def accuracy(setting, lengths=lengths, attention=attention):
                return metrics("F7", f"{setting}, {lengths} lengths, {attention}", era)["greedy_accuracy"]

            able = accuracy("eval mode, checkpointing off, cache")
            assert able > 0.5
            broken = eager if attention == "eager" else mixed if lengths == "mixed" else equal
            for kind in ("reentrant", "non-reentrant"):
                assert abs(accuracy(f"train mode, checkpointing {kind}, no cache") - able) <= 0.005
                assert (accuracy(f"train mode, checkpointing {kind}, cache") < 0.75 * able) == broken
            assert abs(accuracy("train mode, checkpointing off, cache") - able) <= 0.005


@pytest.mark.parametrize(
    ("name", "sane", "learns"),
    [
        ("checkpointing off", True, True),
        ("broken", False, False),
        ("gradients repaired", False, False),
        ("rollouts repaired", True, False),
        ("both repaired", True, True),
    ],
)
def test_only_both_repairs_heal(name, sane, learns):
    """Three seeds of five runs: what is sane at the start, and what has learned at the end."""
    for run in of_seeds("F7", f"curve: {name}", "trl-0.14").values():
        assert (run["rewards"][0] > run["accuracy_before"] - 0.08) == sane
        assert (run["accuracy_after"] > run["accuracy_before"] + 0.1) == learns


@old_and_today
def test_grpo_learns_in_a_minute(era):
    """Every seed gains 0.2 in sampled accuracy, in both stacks."""
    for run in of_seeds("ground", "GRPO learns sums", era).values():
        assert run["sampled_after"] - run["sampled_before"] >= 0.2
        assert run["seconds"] <= 60


# Failure F2, "element 0 of tensors does not require grad": the suspects, the cures, the price


@three_eras
def test_only_lora_with_reentrant_checkpointing_fails(era):
    """36 combinations of family, dtype, checkpointing and LoRA: 6 fail in the old stacks, none today."""
    for family in ("Qwen2", "Llama"):
        for dtype in ("float32", "bf16 autocast", "bf16 weights"):
            for kind in KINDS:
                for trained, trainable in (("full", 26), ("LoRA", 8)):
                    found = metrics("F2", f"matrix: {family}, {dtype}, {kind}, {trained}", era)
                    fails = era != "today" and (kind, trained) == ("reentrant", "LoRA")
                    assert (found["reached"], found["trainable"]) == (0 if fails else trainable, trainable)
                    assert (ELEMENT_0 in found["error"]) == fails and bool(found["error"]) == fails


def test_deepspeed_plays_no_part_in_it_and_has_relatives_of_its_own():
    """ZeRO-2 changes no outcome; ZeRO-3 adds CheckpointError, which DeepSpeed's repair takes away."""
    for kind in KINDS:
        for trained, trainable in (("full", 26), ("LoRA", 8)):
            for stage in (2, 3):
                old = metrics("F2", f"ZeRO-{stage}, {kind}, {trained}", "trl-0.14")
                assert (ELEMENT_0 in old["error"]) == ((kind, trained) == ("reentrant", "LoRA"))
                now = metrics("F2", f"ZeRO-{stage}, {kind}, {trained}", "today")
                assert (now["reached"], now["error"]) == (trainable, "")
    now = metrics("F2", "ZeRO-3, non-reentrant, LoRA", "today")
    assert now["trl_forced_reentrant"] and now["checkpointing"] == ["non-reentrant"]  # undone, and it trains
    old = metrics("F2", "ZeRO-3, non-reentrant, LoRA", "trl-0.14")
    for found in (old, metrics("F2", "ZeRO-3, non-reentrant, LoRA, DeepSpeed's repair off", "today")):
        assert (found["reached"], found["error"].split(":")[0]) == (0, "CheckpointError")


@pytest.mark.parametrize("name", CURES)
def test_every_cure_gives_gradients_and_none_gives_sane_rollouts(name):
    """Alone they learn from garbage; with the rollouts repaired they are the run without checkpointing."""
    cases = ("checkpointing off", name, f"{name}, rollouts repaired")
    healthy, alone, both = (of_seeds("F2", f"cure: {case}", "trl-0.14") for case in cases)
    for seed, run in healthy.items():
        assert run["accuracy_after"] > run["accuracy_before"] + 0.08
        assert alone[seed]["reached"] == both[seed]["reached"] == 28
        assert alone[seed]["rewards"][0] < run["accuracy_before"] - 0.08
        assert alone[seed]["accuracy_after"] < run["accuracy_before"] + 0.03
        assert max(abs(a - b) for a, b in zip(both[seed]["rewards"], run["rewards"])) < 0.03
        assert both[seed]["accuracy_after"] > run["accuracy_before"] + 0.08


def test_without_a_cure_nothing_is_trained_and_dpo_trainer_brings_its_own():
    """GRPO stops at the first step; DPOTrainer of the same release reaches all tensors."""
    for run in of_seeds("F2", "cure: nothing", "trl-0.14").values():
        assert run["reached"] == 0 and ELEMENT_0 in run["error"]
    for kind in ("reentrant", "off"):
        runs = of_seeds("F2", f"cure: DPOTrainer, {kind}", "trl-0.14").values()
        assert all(run["reached"] == 28 for run in runs)


@old_and_today
def test_either_kind_of_checkpointing_saves_the_same_memory(era):
    """Claim 3: at every depth within a twentieth of each other, and at 16 layers a sixth of the peak without."""
    for layers in (2, 4, 8, 16):
        off, older, newer = (metrics("F2", f"memory: {layers} layers, {kind}", era)["peak_mib"] for kind in KINDS)
        assert newer <= older <= 1.05 * newer < off
    assert off > 6 * older


def test_switching_checkpointing_off_has_its_price():
    """Claim 19: a step without it holds five times the memory of one with it, in either trainer."""
    off = metrics("F2", "one step: checkpointing off", "trl-0.14")["peak_mib"]
    for name in CURES:
        assert 5 * metrics("F2", f"one step: {name}", "trl-0.14")["peak_mib"] < off


@old_and_today
def test_non_reentrant_checkpointing_works_for_every_family_at_hand(era):
    """Claim 4: nineteen families, every gradient as without checkpointing."""
    runs = [made["figures"] for made in all_of("family: ", era)]
    assert len(runs) == 19
    for found in runs:
        assert found["off"] == found["reentrant"] == found["non-reentrant"] > 10
        assert max(found["reentrant_error"], found["non-reentrant_error"]) < 1e-6


# Failures F3a and F3b: rows of logits


def test_log_probabilities_meet_their_targets():
    """Within 1e-5 of float64, a quarter of kept logits' memory, at most 1.3 times their time, in the same run."""
    ours, kept = (metrics("F3a", f"log-probs: {way}, {MAIN_SHAPE}", "today") for way in (OURS, "kept logits"))
    assert ours["score_error"] <= 1e-5 and ours["gradient_error"] <= 1e-5
    assert ours["beyond_gradients_mib"] <= kept["beyond_gradients_mib"] / 4
    assert ours["gradients_mib"] == kept["gradients_mib"] > 148
    assert ours["time_to_kept"] <= 1.3 and ours["rounds"] >= 5
    half = MAIN_SHAPE.replace("float32", "bfloat16")
    ours, full = (metrics("F3a", f"log-probs: {way}, {half}", "today") for way in (OURS, "full logits"))
    assert ours["score_error"] <= full["score_error"] and ours["gradient_error"] <= full["gradient_error"]


def test_what_released_wheels_do_with_the_other_name():
    """An error once; swallowed; renamed with a warning, then without; swallowed again."""
    found = metrics("F3a", "read in wheels", "today")
    other = dict(zip(found["transformers"], found["other_name"]))
    assert other["4.45.2"] == "TypeError" and other["4.49.0"] == "renamed, FutureWarning"
    assert {other[name] for name in ("4.46.3", "4.48.3", "4.52.4", "4.57.6", "5.23.0")} == {"swallowed"}
    assert {other[name] for name in ("4.50.3", "4.51.3")} == {"renamed, no warning"}


@pytest.mark.parametrize(
    ("era", "name", "right"),
    [
        ("trl-0.14", "as released", True),
        ("trl-0.14-tf-4.52", "as released", False),
        ("trl-0.14-tf-4.52", "argument passed on", True),
    ],
)
def test_the_reward_goes_up_in_one_stack_and_down_in_the_other(era, name, right):
    """At least three seeds of each; loss and KL start at 0 in all; the wrong scores are those of prompt positions."""
    for found in of_seeds("F3b", f"misalignment: {name}", era).values():
        assert abs(found["first_loss"]) < 1e-6 and found["first_kl"] == 0
        gain = found["rewards"][-1] - found["rewards"][0]
        learned = found["answers_in_place_after"] - found["answers_in_place"]
        if right:
            assert gain > 0.3 and learned > 0.5 and found["largest_error"] < 1e-5 and found["probe_error"] < 1e-5
        else:
            assert gain < -0.05 and learned < -0.2 and found["equal_to_prompt_positions"]
            assert found["probe_error"] > 1 and "first prompt positions" in found["probe_found"]
            assert found["answers_at_prompt_after"] > found["answers_at_prompt"] + 3


def test_every_prediction_is_within_a_twentieth():
    """Every case was measured; nothing of it is called simulated.

    What a CPU holds for a bfloat16 product is a matter of the processor, so that no prediction is held against it.
    """
    made = all_of("predicted: ")
    assert {each["tier"] for each in made} == {"cpu"}
    assert not any("bfloat16" in each["case"] for each in made)
    kinds = ("full logits", "kept logits", "chunked logits", "reentrant", "float32", "weights of", "4 bit")
    for part in kinds:
        assert any(part in each["case"] for each in made), part
    for found in (each["figures"] for each in made):
        assert found["ratio"] == found["predicted_mib"] / found["measured_mib"]
        assert 0.95 < found["ratio"] < 1.05


# Failures F4 and F5: engines and devices


@three_eras
def test_generation_under_zero3(era):
    """Hooks on: the same tokens, in twice the time or more. The engine handed over costs next to nothing."""
    ways = {
        "without DeepSpeed": (False, 0.5, 1.5),
        "engine handed over, hooks off": (False, 1, 1),  # what all are compared with
        "bare model handed over, hooks on": (True, 2, 100),
        "model.generate by itself": (True, 2, 100),
    }
    for way, (hooks, least, most) in ways.items():
        found = metrics("F4", f"generation: {way}", era)
        assert found["same_tokens"] and (found["hooks"] > 0) == hooks and least <= found["ratio"] <= most


@three_eras
def test_zero_trains_the_same(era):
    """On fixed completions each stage ends within 1e-5 of the run without DeepSpeed, a hundredth of the change."""
    for stage in range(4):
        found = metrics("F4", f"parity: stage {stage}", era)
        assert found["largest_difference"] <= 1e-5 <= found["largest_change"] / 100 + 1e-7


def test_what_each_zero_stage_shards():
    """Stage 1 halves the optimizer's state between two processes already; stage 3 adds the parameters."""
    held = [metrics("F4", f"held by one of two: stage {stage}", "today") for stage in range(4)]
    whole = held[0]["whole_model"]
    assert [each["state"] / whole for each in held] == [2, 1, 1, 1]
    assert [each["parameters"] / whole for each in held] == [1, 1, 1, 0.5]
    assert held[0]["gradients"] == whole and held[3]["gradients"] == whole / 2


def test_simulated_memory_stands_beside_the_arithmetic():
    """Weights to the byte, in both stacks; a 72B step in under a minute and 2 GB; the fused kernel keeps no scores."""
    made = all_of("simulated step: ")
    assert {each["era"] for each in made} == {"trl-0.14", "today"} and len(made) == 7
    assert {each["case"].removeprefix("simulated step: ") for each in made} == set(SIMULATED)
    assert {each["tier"] for each in made} == {"simulated"}
    for found in (each["figures"] for each in made):
        assert found["weights_by_hand"] in (None, found["weights_bytes"])
        assert found["seconds"] < 60 and found["process_peak_bytes"] < 2 << 30
        assert 2 < (found["decomposed_bytes"] - found["peak_bytes"]) / found["scores_by_hand"] < 2.5


# Notebook 08: everything together


def test_four_failures_are_found_before_the_first_step():
    """In one stack as released: each measurement turns with its own repair, and no measurement waits for another."""
    for count, name in enumerate(("broken", "placement", "gradients", "rollouts", "logits")):
        for run in of_seeds("F2" if count < 2 else "F7", f"four at once: {name}", "trl-0.15").values():
            assert (run["without_gradient"], run["trainable"]) == (0 if count >= 2 else 28, 28)
            assert ("element 0 of tensors" in run["error"]) == (count < 2)
            assert run["rollouts_agree"] == (run["rollout_error"] < 0.01) == (count >= 3)
            assert (run["rows_made"] >= 2 * run["rows_needed"]) == (count < 4)
    for maker, refused in (("the script", 1), ("each rank", 0)):
        found = metrics("F5", f"four at once: placement as {maker} makes it", "trl-0.15")
        assert (found["refused"], found["ranks"]) == (refused, 2)
        assert ("on a different device than the one" in found["text"]) == bool(refused)


def test_the_reward_is_back_with_the_third_repair():
    """Gradients alone follow garbage; with sane rollouts it learns; fewer rows of logits change no reward."""
    garbage, sane, healed = (
        of_seeds("F7", f"four at once: {name}", "trl-0.15") for name in ("gradients", "rollouts", "logits")
    )
    for run in garbage.values():
        assert run["rewards"][0] < run["accuracy_before"] - 0.08
        assert max(run["rewards"]) < run["accuracy_before"]
    assert sane.keys() == healed.keys()
    for seed, run in healed.items():
        assert run["accuracy_after"] > run["accuracy_before"] + 0.1
        assert max(abs(a - b) for a, b in zip(sane[seed]["rewards"], run["rewards"], strict=True)) < 0.02


def test_qlora_learns_and_leaves_the_4_bit_weights_as_they_are():
    """Bit for bit; every adapter tensor changed; as good as in float32; nothing of it without a learning rate."""
    names = ("4 bit", "float32", "4 bit, learning rate 0")
    four, full, still = (of_seeds("ground", f"QLoRA: {name}", "today").values() for name in names)
    for run in four:
        assert run["quantized"] == run["quantized_unchanged"] == 14
        assert run["quantized_require_grad"] == run["quantized_with_gradient"] == 0
        assert run["adapters"] == run["adapters_changed"] == 28
        assert run["rewards"][-1] > run["rewards"][0] + 0.1
        assert (run["guards_asked"], run["checkpointing"]) == (4, ["non-reentrant"])
    for run in (*four, *full):
        assert run["sampled_after"] > run["sampled_before"] + 0.15
    for run in still:
        assert run["adapters_changed"] == 0 and run["sampled_after"] == run["sampled_before"]


def test_4_bit_weights_are_constants_that_gradients_pass():
    """Claim 24: none has a gradient; the adapters have those of the dequantized numbers, not of the original ones."""
    found = metrics("ground", "QLoRA: gradients", "today")
    assert (found["quantized"], found["require_grad"], found["with_gradient"]) == (14, 0, 0)
    assert found["adapters"] == found["adapters_with_gradient"] == 28
    assert found["difference_to_dequantized"] < 1e-4 < 0.01 < found["difference_to_original"]
    assert found["bytes_in_float32"] == 8 * found["bytes_in_4_bit"]
