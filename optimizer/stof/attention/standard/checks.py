# SPDX-License-Identifier: Apache-2.0
"""Sites that became ``Attention`` of ONNX, before verification: each beside what it replaces, both held against fp64.

ONNX Runtime itself runs the nodes that were written for a site, on the tensors that enter the site in the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from stof.attention.checks.site_checks import AttentionChecks
from stof.attention.checks.site_comparison import compare_result, result_in_heads
from stof.attention.standard.decide import StandardRewrite
from stof.attention.standard.emit import OP, attributes_of, emit_standard
from stof.attention.subgraphs import Scope
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.graph.index import find_needed
from stof.graph.node_fields import attributes_of as node_attributes
from stof.mask.site import EmptyRows
from stof.verification.result import Comparison
from stof.verification.site_checks import Run, Tensors


class StandardChecks(AttentionChecks):
    """The sites of a model that became ``Attention``.

    Args:
        scopes: the main graph, with the original and its working copy, and subgraphs with sites.
        rewrites: what was replaced.
    """

    def __init__(self, scopes: Sequence[Scope], rewrites: Sequence[StandardRewrite]) -> None:
        super().__init__(scopes, rewrites)
        self._standard = tuple(rewrites)

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        return emit_standard(self.scopes[0], [r for r in self._standard if r.site.name in set(sites)])

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        """The attributes of the nodes: windows longer than any input that is tried show nowhere else."""
        writers = {o: n for n in emitted.graph.node for o in n.output}
        for rewrite in self._standard:
            wanted, node = attributes_of(rewrite), writers[rewrite.site.output]
            while node.op_type != OP:
                node = writers[node.input[0]]
            found = node_attributes(node)
            if found.keys() != wanted.keys() or any(not np.isclose(found[n], wanted[n]) for n in found):
                detail = f"its node has {found}, expected {wanted}"
                yield Comparison(f"site {rewrite.site.name!r}", np.inf, 0.0, False, rewrite.site.name, detail)

    def compare_by_run(self, emitted: onnx.ModelProto, captured: Tensors, run: Run) -> Iterator[Comparison]:
        some = [r for r in self._standard if self._is_captured(r, captured)]
        if not some:
            return
        outputs = [r.site.output for r in some]
        model = self._nodes_between(emitted, captured, outputs)
        try:
            found = run(model, outputs, {i.name: captured[i.name] for i in model.graph.input})
        except LimitReached:
            raise
        except RuntimeFailure as error:  # what the operator refuses
            name = some[0].site.name
            yield Comparison(f"site {name!r}", np.inf, 0.0, False, name, str(error))
            return
        for rewrite in some:
            site = rewrite.site
            mine = result_in_heads(site, captured, np.asarray(found[site.output]))
            # Of captured tensors the output alone is of the original; the site reads none of it.
            all_keys = rewrite.mask.empty_rows is EmptyRows.ALL
            yield compare_result(
                site, mine, captured, captured[site.output], rewrite.ignores_empty_rows, has_all_policy=all_keys
            )

    def _is_captured(self, rewrite: StandardRewrite, captured: Tensors) -> bool:
        """Whether what the site reads and gives was captured; sites of which it was not are left to the outputs."""
        site = rewrite.site
        names = [site.query.tensor, site.key.tensor, site.value.tensor, site.output, *(t.tensor for t in site.terms)]
        names += [site.query_factor[1]] if site.query_factor is not None else []
        return all(name in captured for name in names)

    def _nodes_between(self, emitted: onnx.ModelProto, captured: Tensors, outputs: Sequence[str]) -> onnx.ModelProto:
        """The emitted nodes from captured tensors to some outputs, as a model."""
        graph = emitted.graph
        known = set(captured) - set(outputs)
        nodes = [n for n in graph.node if not any(o in known for o in n.output)]
        needed = find_needed(outputs, nodes)
        model = onnx.ModelProto(ir_version=emitted.ir_version)
        model.opset_import.extend(emitted.opset_import)
        model.functions.extend(emitted.functions)
        model.graph.name = "sites"
        model.graph.node.extend(n for n in nodes if needed.intersection(n.output))
        model.graph.initializer.extend(t for t in graph.initializer if t.name in needed and t.name not in known)
        for name in sorted(needed & known):
            model.graph.input.append(helper.make_tensor_value_info(name, self._dtype(emitted, name), None))
        for rewrite in self._standard:
            if rewrite.site.output in outputs:
                info = helper.make_tensor_value_info(rewrite.site.output, rewrite.site.dtype, None)
                model.graph.output.append(info)
        return model

    def _dtype(self, emitted: onnx.ModelProto, name: str) -> int:
        declared = next((i.type.tensor_type.elem_type for i in emitted.graph.input if i.name == name), 0)
        return int(declared or self.symbolic.dtype(name))
