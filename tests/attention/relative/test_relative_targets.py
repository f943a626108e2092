# SPDX-License-Identifier: Apache-2.0
"""Targets whose kernels take no relative tables: the term stays a bias there, and a problem with one is refused."""

from __future__ import annotations

import onnx
import pytest
from zoo_graphs import fill_graph

from stof.attention.decide import cost_cuda, cost_tensorrt
from stof.attention.describe import site_describer
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.function_body import OP
from stof.attention.subgraphs import Scope, find_scopes
from stof.options import Options
from stof.targets import TARGETS

ROLES = frozenset({"relative_key", "relative_key1", "relative_query", "relative_value"})
GRAPHS = ["relative/deberta-v1.torchscript.eager", "relative/parakeet-window.torchscript.eager"]


def describe(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Scope, list[DescribedSite]]:
    monkeypatch.setattr(site_describer, "relative_roles", lambda: ROLES)
    scope = next(iter(find_scopes(make_working_copy(fill_graph(name)))))
    describer = SiteDescriber(scope.working.model, scope.symbolic, Options(target=target))
    return scope, [describer.describe(site) for site in scope.sites]


@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if not target.takes_relative_terms])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_term_stays_a_bias(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scope, described = describe(name, target, monkeypatch)
    rewrites = []
    for one in described:
        assert one.mask is not None, one.reason
        assert (len(one.mask.bias), one.mask.relative_terms) == (1, ())
        rewrites.append(Rewrite(one.site, one.mask))
    nodes = [n for n in emit(scope.working.model, scope.symbolic, rewrites).graph.node if n.op_type == OP]
    assert len(nodes) == len(described) > 0
    for node in nodes:
        strings = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
        assert "bias" in strings["operands"].split()
        assert "relative_index" not in strings
        assert not ROLES & set(strings["operands"].split())


def test_a_problem_is_refused_by_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    _, described = describe(GRAPHS[0], "cpu", monkeypatch)
    assert described[0].problem is not None
    assert described[0].problem.relative_terms
    role = described[0].problem.relative_terms[0][0]
    refusals = {"cuda": cost_cuda.refusals, "tensorrt": cost_tensorrt.refusals}
    for target in (t for t in refusals if not TARGETS[t].takes_relative_terms):
        assert any(role in reason for reason in refusals[target](described[0].problem))
