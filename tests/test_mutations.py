"""Every fault that scripts/mutate.py plants in the kernels is caught, and docs/reliability.md says so."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import mutate  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def programs():
    mutate.prepare(mutate.MUTATIONS)


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda m: m.name)
def test_is_caught(mutation):
    assert mutate.complaint(mutation.probe, mutation.sanitize, mutation)


def test_nothing_is_found_without_a_fault():
    probes = {(m.probe.label, m.sanitize): m.probe for m in mutate.MUTATIONS}
    found = {label: mutate.complaint(probe, sanitize) for (label, sanitize), probe in probes.items()}
    assert not any(found.values()), {label: wrong for label, wrong in found.items() if wrong}


def test_the_page_has_every_fault():
    page = mutate.PAGE.read_text()
    assert all(f"| {m.name} | {m.models} | {m.probe.label} | " in page for m in mutate.MUTATIONS)
    assert "**missed**" not in page
