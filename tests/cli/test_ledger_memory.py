"""Tables of predicted and measured memory, and of a card's benchmarks; what the CPU's ledger must say."""

import pytest

from failurelab_course import eras
from failurelab_course.ledger import pages as ledger_tables
from failurelab_course.ledger import records as evidence
from failurelab_course.ledger.tables import memory as ledger_memory

LEDGER = eras.root() / "evidence" / "cpu.json"


def record(case, figures, tier="gpu", device="NVIDIA H200", source="benchmarks/x.py"):
    return {
        "schema": 1,
        "failure": "F3a",
        "case": case,
        "state": "measured",
        "era": "today",
        "seed": 0,
        "tier": tier,
        "device": device,
        "versions": {"torch": "2"},
        "source": source,
        "figures": figures,
    }


PREDICTED = {"arithmetic_mib": None, "predicted_mib": 20.0, "measured_mib": 16.0, "ratio": 1.25}
TIMED = {"seconds": 0.0125, "time_to_kept": 1.5, "peak_mib": 300.4, "memory_to_kept": 0.25}


def test_what_the_ledger_says_of_predictions():
    """Every case was measured, and the simulation is within a twentieth; nothing of it is called simulated.

    What a CPU holds for a bfloat16 product is a matter of the processor, so that no prediction is held against it.
    """
    made = [each for each in evidence.load(LEDGER) if each["case"].startswith("predicted: ")]
    assert {each["tier"] for each in made} == {"cpu"}
    said = [each["case"] for each in made]
    kinds = ("full logits", "kept logits", "chunked logits", "reentrant", "float32", "weights of", "4 bit")
    for part in kinds:
        assert any(part in case for case in said), part
    assert not any("bfloat16" in case for case in said)
    for each in made:
        found = each["figures"]
        assert found["ratio"] == found["predicted_mib"] / found["measured_mib"]
        assert 0.95 < found["ratio"] < 1.05, each["case"]


def test_each_card_has_a_table_and_without_one_it_is_not_run(tmp_path):
    """Ledgers of cards are found by their tier; what a card could not run keeps its reason."""
    assert ledger_memory.of_cards(tmp_path) == []
    for table in ("predicted", "card-log-probs"):
        assert "NOT RUN" in ledger_tables.TABLES[table]([], [])
    case = "log-probs: kept, selective_log_softmax, 2 x (256+768), width 896, tied, bfloat16"
    cards = [
        record("predicted: kept logits", PREDICTED),
        record("predicted: full logits", {"predicted_mib": 9.0, "not_run": "too small"}),
        record(case, TIMED),
        record(case, {"not_run": "out of memory"}, device="NVIDIA A100"),
        record("predicted: simulated", PREDICTED, tier="simulated"),
    ]
    evidence.save(tmp_path / "h200.json", cards)
    cards = ledger_memory.of_cards(tmp_path)
    assert len(cards) == 4
    table = ledger_memory.predicted([record("predicted: kept logits", PREDICTED, "cpu", "a CPU")], cards)
    assert table.index("a CPU (tier: cpu)") < table.index("NVIDIA H200 (tier: gpu)")
    assert "| kept logits |  | 20.0 | 16.0 |  | 1.250 |" in table
    assert "| full logits |  | 9.0 | NOT RUN: too small |  |  |" in table and "simulated |  |" not in table
    table = ledger_memory.card_log_probs([], cards)
    shape = "2 x (256+768), width 896, tied, bfloat16"
    assert f"| {shape} | kept, selective_log_softmax | 12.5 | 1.50 | 300 | 0.25 |" in table
    assert f"| {shape} | kept, selective_log_softmax | NOT RUN: out of memory |  |  |  |" in table


def test_a_card_s_ledger_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "h200.json").write_text("{")
    with pytest.raises(evidence.EvidenceError, match=r"h200\.json is not a ledger"):
        ledger_memory.of_cards(tmp_path)
