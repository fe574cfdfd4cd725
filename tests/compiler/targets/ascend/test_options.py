"""How sizes are written, and the graphs that follow from them."""

import pytest

from hybridge.artifacts.errors import UsageError
from hybridge.compiler.targets.ascend.options import AscendOptions, parse_buckets


def test_buckets():
    assert parse_buckets("") == {}
    found = parse_buckets("decode=8/1/8, prefill=512,sequences=2")
    assert found == {
        "decode_sequences": (1, 8),
        "prefill_tokens": (512,),
        "prefill_sequences": 2,
    }


def test_a_phase_has_a_graph_a_bucket():
    options = AscendOptions("ascend-950", **parse_buckets("decode=16/1,prefill=512"))
    decode = options.buckets("decode")
    assert list(decode) == ["decode_b1", "decode_b16"]
    assert all(each.tokens == each.sequences == each.logits for each in decode.values())
    (prefill,) = options.buckets("prefill").items()
    assert (prefill[0], prefill[1].tokens, prefill[1].sequences) == ("prefill", 512, 4)


def test_a_bucket_has_no_more_sequences_than_tokens():
    options = AscendOptions("ascend-950", prefill_tokens=(2,), prefill_sequences=4)
    assert options.buckets("prefill")["prefill"].sequences == 2


@pytest.mark.parametrize("text", ["decode", "decode=", "decode=0", "tokens=4", "decode=1/-1"])
def test_other_words_are_refused(text):
    with pytest.raises(UsageError, match="cannot read"):
        parse_buckets(text)


def test_what_all_graphs_share_has_one_size():
    with pytest.raises(UsageError, match="share the caches"):
        parse_buckets("blocks=16/32")


def test_an_unknown_layout_mode_is_refused():
    with pytest.raises(UsageError, match="unknown --nz"):
        AscendOptions("ascend-950", nz="some")
