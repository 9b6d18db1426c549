"""The ledger: validated, merged, and the README's tables made from it."""

import pytest

from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.ledger import pages as ledger_tables
from failurelab_course.ledger import records as evidence

ROOT = eras.root()
LEDGER = ROOT / "evidence" / "cpu.json"


def record(**changes):
    return observe.record("F1", "broken", {"changed": 1}, case="frozen", seed=0) | changes


def test_a_ledger_keeps_what_was_recorded(tmp_path):
    """Saved and loaded, records are the same; a newer one replaces the same measurement."""
    path = tmp_path / "cpu.json"
    evidence.save(path, evidence.replace([], [record(), record(seed=1), record(figures={"changed": 2})]))
    assert [(made["seed"], made["figures"]) for made in evidence.load(path)] == [
        (0, {"changed": 2}),
        (1, {"changed": 1}),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"records": [{"schema": 1}]}', '{"records": 3}'],
    ids=["empty", "a list", "no fields", "a number"],
)
def test_what_is_no_ledger_is_refused(tmp_path, text):
    """A file cut short is found, and named."""
    path = tmp_path / "cpu.json"
    path.write_text(text)
    with pytest.raises(evidence.EvidenceError, match=r"cpu\.json"):
        evidence.load(path)


def test_a_newer_schema_is_refused():
    """An old package does not misread a newer ledger."""
    with pytest.raises(evidence.EvidenceError, match="newer"):
        evidence.validate(record(schema=2))


def test_a_table_that_does_not_exist_is_refused():
    """A typing error in the README is found, not left as it is."""
    with pytest.raises(evidence.EvidenceError, match="unknown table 'lerning'"):
        ledger_tables.update("<!-- table: lerning -->\n<!-- end table -->", [])


def test_a_benchmark_that_records_nothing_is_an_error(tmp_path, monkeypatch):
    """A benchmark whose figures are lost must not look recorded."""
    (tmp_path / "eras").symlink_to(ROOT / "eras")
    (tmp_path / "helpers").symlink_to(ROOT / "helpers")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "silent.py").write_text('"""Nothing.\n\nEras: today.\n"""\n')
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    assert evidence.benchmarks() == {"silent": ("today",)}
    with pytest.raises(evidence.EvidenceError, match="recorded nothing"):
        evidence.run_benchmark("silent", "today", tmp_path / "out")
    (tmp_path / "benchmarks" / "silent.py").write_text("raise SystemExit('it broke')")
    with pytest.raises(evidence.EvidenceError, match="exit status 1"):
        evidence.run_benchmark("silent", "today", tmp_path / "out")


def test_the_ledger_in_the_repository_is_valid():
    """Every stored record follows the schema, and comes from a CPU."""
    records = evidence.load(LEDGER)
    assert {made["tier"] for made in records} <= {"cpu", "simulated"}
    assert len({evidence.key(made) for made in records}) == len(records) > 0


@pytest.mark.parametrize("name", ledger_tables.PAGES)
def test_the_tables_of_a_page_are_not_stale(name):
    """Tables are written from the ledger by `failurelab evidence tables`, and by nothing else."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in page
    assert ledger_tables.update(page, evidence.load(LEDGER)) == page


def test_every_table_is_shown():
    """A table that no page shows is no use to anyone."""
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ledger_tables.PAGES)
    assert [name for name in ledger_tables.TABLES if f"<!-- table: {name} -->" not in pages] == []


def test_the_readme_s_picture_is_not_stale():
    """The picture carries a digest of the curves that it shows."""
    from PIL import Image

    shown = Image.open(ROOT / "evidence" / "rollouts.png").info["Description"]
    assert shown == ledger_tables.picture_digest(evidence.load(LEDGER))


# What the ledger must say for the course's text to be true.


def figures(failure, case, era):
    (made,) = [
        each
        for each in evidence.load(LEDGER)
        if (each["failure"], each["case"], each["era"]) == (failure, case, era)
        and each["source"].startswith("benchmarks/")
    ]
    return made["figures"]


@pytest.mark.parametrize("era", ["trl-0.14", "trl-0.15"])
@pytest.mark.parametrize("trainer", ["GRPO", "Online DPO"])
def test_the_three_faces_of_the_warning(trainer, era):
    """Harmless, silent, fatal; each healed by the repair, which leaves the warning; non-reentrant has none of it."""
    full = figures("F1", f"{trainer}, full, reentrant", era)
    assert full["warnings"] > 0 and (full["changed"], full["trainable"]) == (26, 26)
    frozen = figures("F1", f"{trainer}, embeddings frozen, reentrant", era)
    assert frozen["warnings"] > 0 and (frozen["changed"], frozen["error"]) == (1, "")
    lora = figures("F1", f"{trainer}, LoRA, reentrant", era)
    assert lora["changed"] == 0 and "element 0 of tensors does not require grad" in lora["error"]
    for setup, trainable in (("full", 26), ("embeddings frozen", 25), ("LoRA", 8)):
        repaired = figures("F1", f"{trainer}, {setup}, reentrant, require_input_grads", era)
        assert repaired["warnings"] > 0 and repaired["changed"] == repaired["trainable"] == trainable
        newer = figures("F1", f"{trainer}, {setup}, non-reentrant", era)
        assert (newer["warnings"], newer["changed"]) == (0, trainable)


@pytest.mark.parametrize("trainer", ["GRPO", "Online DPO"])
def test_today_has_none_of_the_three_faces(trainer):
    """All tensors change and nothing warns, whatever is frozen and whichever kind is asked for."""
    for setup, trainable in (("full", 26), ("embeddings frozen", 25), ("LoRA", 8)):
        for kind in ("off", "reentrant", "non-reentrant"):
            found = figures("F1", f"{trainer}, {setup}, {kind}", "today")
            assert (found["warnings"], found["changed"]) == (0, trainable)


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
                return figures("F7", f"{setting}, {lengths} lengths, {attention}", era)["greedy_accuracy"]

            able = accuracy("eval mode, checkpointing off, cache")
            assert able > 0.5
            broken = eager if attention == "eager" else mixed if lengths == "mixed" else equal
            for kind in ("reentrant", "non-reentrant"):
                assert abs(accuracy(f"train mode, checkpointing {kind}, no cache") - able) <= 0.005
                assert (accuracy(f"train mode, checkpointing {kind}, cache") < 0.75 * able) == broken
            assert abs(accuracy("train mode, checkpointing off, cache") - able) <= 0.005


def test_only_both_repairs_heal():
    """Three seeds of five runs: what is sane at the start, and what has learned at the end."""
    expected = {
        "checkpointing off": (True, True),
        "broken": (False, False),
        "gradients repaired": (False, False),
        "rollouts repaired": (True, False),
        "both repaired": (True, True),
    }
    for name, (sane, learns) in expected.items():
        runs = [made for made in evidence.load(LEDGER) if made["case"] == f"curve: {name}"]
        assert len({made["seed"] for made in runs}) >= 3
        for made in runs:
            found = made["figures"]
            assert (found["rewards"][0] > found["accuracy_before"] - 0.08) == sane, (name, made["seed"])
            assert (found["accuracy_after"] > found["accuracy_before"] + 0.1) == learns, (name, made["seed"])


@pytest.mark.parametrize("era", ["today", "trl-0.14"])
def test_grpo_learns_in_a_minute(era):
    """Every seed gains 0.2 in sampled accuracy, in both stacks."""
    runs = [
        made["figures"] for made in evidence.load(LEDGER) if made["case"] == "GRPO learns sums" and made["era"] == era
    ]
    assert len(runs) >= 3
    for run in runs:
        assert run["sampled_after"] - run["sampled_before"] >= 0.2
        assert run["seconds"] <= 60


# "element 0 of tensors does not require grad": the suspects, the cures, the price.

ELEMENT_0 = "element 0 of tensors does not require grad"


@pytest.mark.parametrize("era", ["trl-0.14", "trl-0.15", "today"])
def test_only_lora_with_reentrant_checkpointing_fails(era):
    """36 combinations of family, dtype, checkpointing and LoRA: 6 fail in the old stacks, none today."""
    for family in ("Qwen2", "Llama"):
        for dtype in ("float32", "bf16 autocast", "bf16 weights"):
            for kind in ("off", "reentrant", "non-reentrant"):
                for trained, trainable in (("full", 26), ("LoRA", 8)):
                    found = figures("F2", f"matrix: {family}, {dtype}, {kind}, {trained}", era)
                    fails = era != "today" and (kind, trained) == ("reentrant", "LoRA")
                    assert (found["reached"], found["trainable"]) == (0 if fails else trainable, trainable)
                    assert (ELEMENT_0 in found["error"]) == fails and bool(found["error"]) == fails


def test_deepspeed_plays_no_part_in_it_and_has_relatives_of_its_own():
    """ZeRO-2 changes no outcome; ZeRO-3 adds CheckpointError, which DeepSpeed's repair takes away."""
    for kind in ("off", "reentrant", "non-reentrant"):
        for trained, trainable in (("full", 26), ("LoRA", 8)):
            for stage in (2, 3):
                old = figures("F2", f"ZeRO-{stage}, {kind}, {trained}", "trl-0.14")
                assert (ELEMENT_0 in old["error"]) == ((kind, trained) == ("reentrant", "LoRA"))
                now = figures("F2", f"ZeRO-{stage}, {kind}, {trained}", "today")
                assert (now["reached"], now["error"]) == (trainable, "")
    old = figures("F2", "ZeRO-3, non-reentrant, LoRA", "trl-0.14")
    assert (old["reached"], old["error"].split(":")[0]) == (0, "CheckpointError")
    now = figures("F2", "ZeRO-3, non-reentrant, LoRA", "today")
    assert now["trl_forced_reentrant"] and now["checkpointing"] == ["non-reentrant"]  # undone, and it trains
    unrepaired = figures("F2", "ZeRO-3, non-reentrant, LoRA, DeepSpeed's repair off", "today")
    assert (unrepaired["reached"], unrepaired["error"].split(":")[0]) == (0, "CheckpointError")


def cure(name):
    """Return a cure's figures by seed."""
    runs = [
        made
        for made in evidence.load(LEDGER)
        if (made["failure"], made["case"]) == ("F2", f"cure: {name}") and made["source"].startswith("benchmarks/")
    ]
    assert len({made["seed"] for made in runs}) == len(runs) >= 3
    return {made["seed"]: made["figures"] for made in runs}


CURES = (
    "enable_input_require_grads before the wrap",
    "enable_input_require_grads after the wrap",
    "forward hook written out",
    "checkpointing before the wrap",
    "use_reentrant=False",
    "prepare_peft",
)


@pytest.mark.parametrize("name", CURES)
def test_every_cure_gives_gradients_and_none_gives_sane_rollouts(name):
    """Alone they learn from garbage; with the rollouts repaired they are the run without checkpointing."""
    healthy, alone, both = cure("checkpointing off"), cure(name), cure(f"{name}, rollouts repaired")
    for seed, run in healthy.items():
        assert run["accuracy_after"] > run["accuracy_before"] + 0.08
        assert alone[seed]["reached"] == both[seed]["reached"] == 28
        assert alone[seed]["rewards"][0] < run["accuracy_before"] - 0.08
        assert alone[seed]["accuracy_after"] < run["accuracy_before"] + 0.03
        assert max(abs(a - b) for a, b in zip(both[seed]["rewards"], run["rewards"])) < 0.03
        assert both[seed]["accuracy_after"] > run["accuracy_before"] + 0.08


def test_without_a_cure_nothing_is_trained_and_dpo_trainer_brings_its_own():
    """GRPO stops at the first step; DPOTrainer of the same release reaches all tensors."""
    for run in cure("nothing").values():
        assert run["reached"] == 0 and ELEMENT_0 in run["error"]
    for kind in ("reentrant", "off"):
        assert all(run["reached"] == 28 for run in cure(f"DPOTrainer, {kind}").values())


@pytest.mark.parametrize("era", ["trl-0.14", "today"])
def test_either_kind_of_checkpointing_saves_the_same_memory(era):
    """Claim 3: at every depth within a twentieth of each other, and at 16 layers a sixth of the peak without."""
    for layers in (2, 4, 8, 16):
        off, older, newer = (
            figures("F2", f"memory: {layers} layers, {kind}", era)["peak_mib"]
            for kind in ("off", "reentrant", "non-reentrant")
        )
        assert newer <= older <= 1.05 * newer < off
    assert off > 6 * older


def test_switching_checkpointing_off_has_its_price():
    """Claim 19: a step without it holds five times the memory of one with it, in either trainer."""
    off = figures("F2", "one step: checkpointing off", "trl-0.14")["peak_mib"]
    for name in CURES:
        assert 5 * figures("F2", f"one step: {name}", "trl-0.14")["peak_mib"] < off


@pytest.mark.parametrize("era", ["trl-0.14", "today"])
def test_non_reentrant_checkpointing_works_for_every_family_at_hand(era):
    """Claim 4: nineteen families, every gradient as without checkpointing."""
    runs = [made for made in evidence.load(LEDGER) if made["case"].startswith("family: ") and made["era"] == era]
    assert len(runs) == 19
    for made in runs:
        found = made["figures"]
        assert found["off"] == found["reentrant"] == found["non-reentrant"] > 10
        assert max(found["reentrant_error"], found["non-reentrant_error"]) < 1e-6


# Failures F3a and F3b: rows of logits


def test_the_readme_s_second_picture_is_not_stale():
    """It carries a digest of the curves that it shows, as the first one does."""
    from PIL import Image

    shown = Image.open(ROOT / "evidence" / "misalignment.png").info["Description"]
    assert shown == ledger_tables.misalignment_digest(evidence.load(LEDGER))


def test_log_probabilities_meet_their_targets():
    """Within 1e-5 of float64, a quarter of kept logits' memory, at most 1.3 times their time, in the same run."""
    main = "4 x (256+64), width 256, tied, float32"
    ours, kept = (figures("F3a", f"log-probs: {way}, {main}", "today") for way in ("completion_logps", "kept logits"))
    assert ours["score_error"] <= 1e-5 and ours["gradient_error"] <= 1e-5
    assert ours["beyond_gradients_mib"] <= kept["beyond_gradients_mib"] / 4
    assert ours["gradients_mib"] == kept["gradients_mib"] > 148
    assert ours["time_to_kept"] <= 1.3 and ours["rounds"] >= 5
    half = "4 x (256+64), width 256, tied, bfloat16"
    ours, full = (figures("F3a", f"log-probs: {way}, {half}", "today") for way in ("completion_logps", "full logits"))
    assert ours["score_error"] <= full["score_error"] and ours["gradient_error"] <= full["gradient_error"]


def test_what_released_wheels_do_with_the_other_name():
    """An error once; swallowed; renamed with a warning, then without; swallowed again."""
    found = figures("F3a", "read in wheels", "today")
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
    runs = [each for each in evidence.load(LEDGER) if (each["era"], each["case"]) == (era, f"misalignment: {name}")]
    assert len({each["seed"] for each in runs}) >= 3
    for found in (each["figures"] for each in runs):
        assert abs(found["first_loss"]) < 1e-6 and found["first_kl"] == 0
        gain = found["rewards"][-1] - found["rewards"][0]
        learned = found["answers_in_place_after"] - found["answers_in_place"]
        if right:
            assert gain > 0.3 and learned > 0.5 and found["largest_error"] < 1e-5 and found["probe_error"] < 1e-5
        else:
            assert gain < -0.05 and learned < -0.2 and found["equal_to_prompt_positions"]
            assert found["probe_error"] > 1 and "first prompt positions" in found["probe_found"]
            assert found["answers_at_prompt_after"] > found["answers_at_prompt"] + 3


@pytest.mark.parametrize("era", ["trl-0.14", "trl-0.15", "today"])
def test_generation_under_zero3(era):
    """Hooks on: the same tokens, in twice the time or more. The engine handed over costs next to nothing."""
    ways = {
        way: figures("F4", f"generation: {way}", era)
        for way in (
            "without DeepSpeed",
            "engine handed over, hooks off",
            "bare model handed over, hooks on",
            "model.generate by itself",
        )
    }
    assert all(found["same_tokens"] for found in ways.values())
    assert [found["hooks"] > 0 for found in ways.values()] == [False, False, True, True]
    assert 0.5 < ways["without DeepSpeed"]["ratio"] < 1.5
    for way in ("bare model handed over, hooks on", "model.generate by itself"):
        assert ways[way]["ratio"] > 2


@pytest.mark.parametrize("era", ["trl-0.14", "trl-0.15", "today"])
def test_zero_trains_the_same(era):
    """On fixed completions each stage ends within 1e-5 of the run without DeepSpeed, a hundredth of the change."""
    for stage in range(4):
        found = figures("F4", f"parity: stage {stage}", era)
        assert found["largest_difference"] <= 1e-5 <= found["largest_change"] / 100 + 1e-7


def test_what_each_zero_stage_shards():
    """Stage 1 halves the optimizer's state between two processes already; stage 3 adds the parameters."""
    held = [figures("F4", f"held by one of two: stage {stage}", "today") for stage in range(4)]
    whole = held[0]["whole_model"]
    assert [each["state"] / whole for each in held] == [2, 1, 1, 1]
    assert [each["parameters"] / whole for each in held] == [1, 1, 1, 0.5]
    assert held[0]["gradients"] == whole and held[3]["gradients"] == whole / 2


def test_simulated_memory_stands_beside_the_arithmetic():
    """Weights to the byte, in both stacks; a 72B step in under a minute and 2 GB; the fused kernel keeps no scores."""
    made = [each for each in evidence.load(LEDGER) if each["case"].startswith("simulated step: ")]
    assert {each["era"] for each in made} == {"trl-0.14", "today"} and len(made) == 7  # simulated_memory
    for each in made:
        found = each["figures"]
        assert each["tier"] == "simulated"
        assert found["weights_by_hand"] in (None, found["weights_bytes"])
        assert found["seconds"] < 60 and found["process_peak_bytes"] < 2 << 30
        assert 2 < (found["decomposed_bytes"] - found["peak_bytes"]) / found["scores_by_hand"] < 2.5
    names = {each["case"].removeprefix("simulated step: ") for each in made}
    assert names == set(ledger_tables.SIMULATED)


# Notebook 08: everything together


def of_seeds(failure, case, era):
    made = [each for each in evidence.load(LEDGER) if (each["failure"], each["case"]) == (failure, case)]
    found = [each["figures"] for each in made if each["era"] == era and each["source"].startswith("benchmarks/")]
    assert len(found) >= 3, (failure, case, era)
    return found


def test_four_failures_are_found_before_the_first_step():
    """In one stack as released: each measurement turns with its own repair, and no measurement waits for another."""
    states = {
        name: of_seeds("F2" if count < 2 else "F7", f"four at once: {name}", "trl-0.15")
        for count, name in enumerate(("broken", "placement", "gradients", "rollouts", "logits"))
    }
    for count, runs in enumerate(states.values()):
        for run in runs:
            assert (run["without_gradient"], run["trainable"]) == (0 if count >= 2 else 28, 28)
            assert ("element 0 of tensors" in run["error"]) == (count < 2)
            assert run["rollouts_agree"] == (run["rollout_error"] < 0.01) == (count >= 3)
            assert (run["rows_made"] >= 2 * run["rows_needed"]) == (count < 4)
    for early, repaired in ((True, False), (False, True)):
        case = f"four at once: placement as {'the script' if early else 'each rank'} makes it"
        found = figures("F5", case, "trl-0.15")
        assert (found["refused"], found["ranks"]) == (int(not repaired), 2)
        assert ("on a different device than the one" in found["text"]) == early


def test_the_reward_is_back_with_the_third_repair():
    """Gradients alone follow garbage; with sane rollouts it learns; fewer rows of logits change no reward."""
    for run in of_seeds("F7", "four at once: gradients", "trl-0.15"):
        assert run["rewards"][0] < run["accuracy_before"] - 0.08
        assert max(run["rewards"]) < run["accuracy_before"]
    sane, healed = (of_seeds("F7", f"four at once: {name}", "trl-0.15") for name in ("rollouts", "logits"))
    for waste, run in zip(sane, healed, strict=True):
        assert run["accuracy_after"] > run["accuracy_before"] + 0.1
        assert max(abs(a - b) for a, b in zip(waste["rewards"], run["rewards"], strict=True)) < 0.02


def test_qlora_learns_and_leaves_the_4_bit_weights_as_they_are():
    """Bit for bit; every adapter tensor changed; as good as in float32; nothing of it without a learning rate."""
    for run in of_seeds("ground", "QLoRA: 4 bit", "today"):
        assert run["quantized"] == run["quantized_unchanged"] == 14
        assert run["quantized_require_grad"] == run["quantized_with_gradient"] == 0
        assert run["adapters"] == run["adapters_changed"] == 28
        assert run["sampled_after"] > run["sampled_before"] + 0.15
        assert run["rewards"][-1] > run["rewards"][0] + 0.1
        assert (run["guards_asked"], run["checkpointing"]) == (4, ["non-reentrant"])
    for run in of_seeds("ground", "QLoRA: float32", "today"):
        assert run["sampled_after"] > run["sampled_before"] + 0.15
    for run in of_seeds("ground", "QLoRA: 4 bit, learning rate 0", "today"):
        assert run["adapters_changed"] == 0 and run["sampled_after"] == run["sampled_before"]


def test_4_bit_weights_are_constants_that_gradients_pass():
    """Claim 24: none has a gradient; the adapters have those of the dequantized numbers, not of the original ones."""
    found = figures("ground", "QLoRA: gradients", "today")
    assert (found["quantized"], found["require_grad"], found["with_gradient"]) == (14, 0, 0)
    assert found["adapters"] == found["adapters_with_gradient"] == 28
    assert found["difference_to_dequantized"] < 1e-4 < 0.01 < found["difference_to_original"]
    assert found["bytes_in_float32"] == 8 * found["bytes_in_4_bit"]
