"""The tables of papers' figures, and the models that are priced beside them."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tools.paper_jobs")


def num_parameters(workload):
    return sum(parameter.numel() for parameter in workload.model.parameters())


def test_chimeras_models_have_the_parameters_that_its_table_4_prints(papers):
    assert num_parameters(papers.chimera_model("GPT-2")) == 1_389_327_360
    # The paper counts the bias of the vocabulary's head, which has 30,522 elements, once.
    assert num_parameters(papers.chimera_model("Bert-48")) == 669_790_012 + 30_522


@pytest.mark.parametrize("name", ["GPT-1.4B", "GPT-2.5B", "GPT-8.3B", "GPT-20B"])
def test_meraks_models_have_the_billions_of_their_names(papers, name):
    wanted = float(name.removeprefix("GPT-").removesuffix("B")) * 1e9
    assert num_parameters(papers.gpt(*papers.GPTS[name])) == pytest.approx(wanted, rel=0.04)


def test_the_clusters_are_those_of_the_papers(papers):
    merak = papers.cluster("merak_cluster.yaml")
    assert (merak.num_devices, merak.nodes[0].device.name) == (64, "rtx-3090")
    daint = papers.cluster("chimera_piz_daint.yaml")
    assert (daint.num_devices, daint.nodes[0].devices_per_node) == (2048, 1)


def test_every_printed_range_is_one(papers):
    rows = papers.read("merak_tpds.csv")
    assert all(float(row["low"]) <= float(row["high"]) for row in rows if row["low"])
    assert {row["figure"] for row in rows} >= {"table III", "figure 6", "figure 9a"}
    firsts = {row["figure"]: row["schedule"] for row in reversed(papers.read("chimera.csv"))}
    assert firsts == {"14": "chimera", "15": "chimera"}


def test_a_line_names_the_assumption_that_moves_it_most(papers):
    near = papers.compared(2.0, {"": 1.9, "other": 2.0})
    assert (near["÷ paper"], near["what moves it most"]) == (0.95, "")
    moved = papers.compared(2.0, {"": 1.0, "slow": 1.9, "slower": 3.0, "does not fit": 0.0})
    assert moved["what moves it most"] == "slow: 1.90 (0.95 of the paper's)"
    lost = papers.compared(2.0, {"": 1.0, "slow": 1.2})["what moves it most"]
    assert lost == "not explained; nearest, slow: 1.20 (0.60 of the paper's)"


def test_a_page_must_have_the_rows_that_come_out(papers, tmp_path):
    report = importlib.import_module("tools.report")
    page = tmp_path / "page.md"
    page.write_text(
        "| schedule | ÷ paper |\n|---|---|\n| gems | slow: 2.15 (0.89) |\n| 1f1b | 1.235 |\n"
    )
    report.check({"t": [{"schedule": "gems", "÷ paper": "slow: 2.14 (0.90)"}]}, page)
    report.check({"t": [{"schedule": "1f1b", "÷ paper": "1.228"}]}, page)
    with pytest.raises(SystemExit, match="no row of t"):
        report.check({"t": [{"schedule": "1f1b", "÷ paper": "1.223"}]}, page)
    for wrong in ("slow: 2.25 (0.89)", "fast: 2.15 (0.89)", "2.15"):
        with pytest.raises(SystemExit, match="no row of t"):
            report.check({"t": [{"schedule": "gems", "÷ paper": wrong}]}, page)
