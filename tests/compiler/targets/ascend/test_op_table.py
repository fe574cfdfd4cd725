"""The table of what each op becomes: complete, true of the lowerings, and the one in the docs."""

from pathlib import Path

import pytest

from hybridge.compiler.targets.ascend.lowering import LOWERINGS
from hybridge.compiler.targets.ascend.op_table import FORMS, Coverage, coverage, form_of, table
from hybridge.compiler.targets.ascend.own_operators import A3, ASCEND_950

PAGE = Path(__file__).parents[4] / "docs" / "ascend.md"


def test_the_docs_have_this_table():
    assert "\n".join(table()) in PAGE.read_text("utf-8"), (
        "docs/ascend.md: put this table in\n" + "\n".join(table())
    )


@pytest.mark.parametrize("soc", [A3, ASCEND_950])
def test_every_op_has_a_form_with_a_source(soc):
    known = {form.op for form in FORMS if soc in form.socs}
    assert known == {*LOWERINGS, "mla_prolog"}
    assert all(form.source for form in FORMS)


def test_950_has_an_operator_for_all_but_one_router():
    missing = [(f.op, f.becomes) for f in FORMS if not f.exists and ASCEND_950 in f.socs]
    assert missing == [("moe_route", "sigmoid + topk")]


def test_sites_are_counted():
    sites = {"rms_norm": ("npu_rms_norm",) * 3, "attn_res_update": ("reductions",)}
    found = coverage(sites, A3)
    assert found == Coverage(sites=4, fused=3, without_operator=1)
    assert found.share == 1.0
    with pytest.raises(KeyError, match="no form of attn_res_update on ascend-950"):
        form_of("attn_res_update", ASCEND_950, "reductions")
