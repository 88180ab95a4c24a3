"""DFlash and DSpark as z-lab, DeepSpec and speculators write them. References are written out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from history_checkpoints import (
    CONFIGS,
    DEEPSPEC,
    MASK,
    MODEL,
    PRUNED,
    THETA,
    Z_LAB,
    D,
    K,
    R,
    V,
    reference,
    speculators,
    tensors_of,
    write,
)

from dlite.checkpoint import export_history, is_checkpoint, load, read, save
from dlite.cli import main
from dlite.decode import DecodeResult, decode
from dlite.drafters.history import drafter_of
from dlite.layouts import read_config
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks, History
from dlite.target import TargetModel
from dlite.weights import from_history_layout, read_tensors


@pytest.fixture(scope="module")
def bf16_target(tiny_folder: Path) -> TargetModel:
    """Its tables survive bfloat16, so a checkpoint's copies can equal them."""
    return TargetModel.load(str(tiny_folder), dtype="bfloat16")


# ---- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_through_our_layout_and_back_a_key_or_a_bit_is_lost(
    bf16_target: TargetModel, tmp_path: Path, name: str
) -> None:
    config, tensors = CONFIGS[name], tensors_of(CONFIGS[name], bf16_target)
    theirs = write(tmp_path / "theirs", config, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left out of these
        model = load(theirs, bf16_target)
    save(model, tmp_path / "ours", target=bf16_target, training={})
    layout = name.partition("-")[0] if name != "z-lab" else name
    assert read(theirs, 4).layout == layout and is_checkpoint(str(theirs))
    again = load(tmp_path / "ours", bf16_target)
    export_history(again, tmp_path / "back", layout, target=bf16_target)
    expected = json.dumps(config).replace("TARGET", bf16_target.name)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(expected)
    back = read_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype and torch.equal(back[key], tensor), key


def test_the_same_draft_model_differs_between_layouts() -> None:
    """Layer ids are shifted by one, block_size counts otherwise; the model is one."""
    dflash = read_config(Z_LAB)
    assert dflash.tap_ids == (2, 0) and dflash.num_draft_tokens == K
    assert dflash == read_config(CONFIGS["speculators-dflash"], 4)
    dspark = read_config(DEEPSPEC)
    assert dspark == read_config(CONFIGS["speculators-dspark"], 4)
    assert (dspark.first_predictor, dspark.num_draft_tokens, dspark.rank) == ("anchor", K, R)
    late = read_config(CONFIGS["speculators-late"], 4)
    assert (late.first_predictor, late.num_draft_tokens) == ("placeholder", K)


def test_block_size_is_read_from_another_level() -> None:
    """z-lab's older configs have it outside dflash_config, newer ones inside."""
    outer = {k: v for k, v in Z_LAB.items() if k != "block_size"}
    inner = {**outer, "dflash_config": {**Z_LAB["dflash_config"], "block_size": K + 1}}
    assert read_config(inner) == read_config(Z_LAB)
    with pytest.raises(ValueError, match=r"block_size twice, as 16 and in dflash_config as 7"):
        read_config({**inner, "block_size": 16})
    with pytest.raises(ValueError, match="lacks block_size; nothing is guessed"):
        read_config(outer)


def test_keys_of_the_verifier_leak_into_the_draft_model(
    bf16_target: TargetModel, tmp_path: Path
) -> None:
    """A draft's config made from the target's: its lists are longer, its own keys remain."""
    theirs = {
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "max_window_layers": 36,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "quantization_config": {"bits": 4},
    }
    leaky = {**DEEPSPEC, **theirs, "num_experts": 8}
    with pytest.warns(UserWarning, match="config.json has num_experts, which dlite does not know"):
        assert read_config(leaky) == read_config(DEEPSPEC)
    folder = write(tmp_path / "leaky", leaky, tensors_of(DEEPSPEC, bf16_target))
    with pytest.warns(UserWarning, match="num_experts"):
        model = load(folder, bf16_target)
    export_history(model, tmp_path / "out", "deepspec", target=bf16_target)
    assert json.loads((tmp_path / "out/config.json").read_text()) == DEEPSPEC


# ---- what it computes ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:lm_head", "ignore:embed_tokens")
def test_an_import_computes_something_else_than_dflash(
    tiny_target: TargetModel, tmp_path: Path, name: str
) -> None:
    tensors = tensors_of(CONFIGS[name], tiny_target)
    model = load(write(tmp_path / "theirs", CONFIGS[name], tensors), tiny_target)
    weights = {k: t.float() for k, t in tensors.items()}
    ids = [(7 * i) % 300 + 3 for i in range(11)]
    everything = tiny_target.capture([ids], (0, 1, 2))[0]
    states_SLD = everything[:-1, [2, 0]]  # the order of the ids is that of fc's columns
    num_block = K if model.config.first_predictor == "anchor" else K + 1
    block = torch.tensor([ids[-1], *[MASK] * (num_block - 1)])
    expected_KD = reference(weights, states_SLD, tiny_target.embed(block), K)
    history = History(states_SLD, torch.tensor([10]), torch.tensor([0]))
    blocks = Blocks(torch.tensor([ids[-1]]), states_SLD[-1:], history)
    with torch.no_grad():
        torch.testing.assert_close(model.hidden(blocks)[0], expected_KD, rtol=1e-4, atol=1e-4)

    previous, tokens = ids[-1], []
    head_VD = tiny_target.head_weight_VD.detach()
    offsets = tensors.get("d2t")
    if offsets is not None:
        head_VD = head_VD[offsets + torch.arange(PRUNED)]
    for h_D in expected_KD:
        logits_V = head_VD @ h_D
        if model.config.head == "markov":
            w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            logits_V = logits_V + w2 @ w1[previous]
        if offsets is None:
            logits_V[tiny_target.num_token_ids :] = -torch.inf
        previous = int(logits_V.argmax())
        if offsets is not None:
            previous += int(offsets[previous])
        tokens.append(previous)
    assert model.draft(blocks)[0][0].tolist() == tokens


@pytest.mark.parametrize("name", ["z-lab", "speculators-pruned"])
@pytest.mark.filterwarnings("ignore:lm_head")
def test_an_import_changes_what_is_decoded(
    tiny_target: TargetModel, plain_result: DecodeResult, tmp_path: Path, name: str
) -> None:
    tensors = tensors_of(CONFIGS[name], tiny_target)
    model = load(write(tmp_path / "theirs", CONFIGS[name], tensors), tiny_target)
    requests = [done.request for done in plain_result.completions]
    done = decode(tiny_target, requests, drafter_of(model), batch_size=3).completions
    assert [c.tokens for c in done] == [c.tokens for c in plain_result.completions]


# ---- what is refused or left out -------------------------------------------------------------


def nested(**changes: Any) -> dict[str, Any]:
    return speculators("dspark", K, transformer_layer_config={**MODEL, **changes})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DEEPSPEC, "markov_head_type": "gated"}, "markov_head_type is 'gated'; only 'vanilla'"),
        ({**DEEPSPEC, "markov_head_type": "rnn"}, "markov_head_type is 'rnn'; only 'vanilla'"),
        (nested(layer_types=["sliding_attention"] * 2), "layer_types has 'sliding_attention'"),
        (
            {k: v for k, v in {**Z_LAB, "use_sliding_window": True}.items() if k != "layer_types"},
            "layer_types has 'sliding_attention'",
        ),
        ({**Z_LAB, "is_causal": True}, "is_causal is True; only False can be imported"),
        ({**DEEPSPEC, "attention_bias": True}, "attention_bias is True; only False"),
        (nested(attention_bias=True), "attention_bias is True; only False"),
        ({**Z_LAB, "model_type": "llama"}, "model_type is 'llama'; only DFlash's 'qwen3' layers"),
        (nested(rope_parameters={"rope_theta": THETA, "rope_type": "yarn"}), "rope is 'yarn'"),
        ({**DEEPSPEC, "target_layer_ids": [1, 3]}, "has 3, the last layer before the target's"),
        (
            speculators("dflash", 7, aux_hidden_state_layer_ids=[1, 4]),
            r"aux_hidden_state_layer_ids \[1, 4\] has 4, the last layer before",
        ),
        (
            speculators("dflash", 7, aux_hidden_state_layer_ids=[0, 2]),
            "has 0, the target's embeddings",
        ),
        (speculators("dflash", 7, target_hidden_size=128), "target_hidden_size is 128"),
        (
            {**Z_LAB, "dflash_config": {"target_layer_ids": [0]}},
            "lacks mask_token_id",
        ),
        ({**DEEPSPEC, "mask_token_id": 512}, "mask_token_id is 512; the target embeds 0 .. 511"),
        (
            {k: v for k, v in speculators("dspark", 7).items() if k != "sample_from_anchor"},
            "lacks sample_from_anchor; nothing is guessed",
        ),
        ({**DEEPSPEC, "architectures": ["LlamaForCausalLMEagle3"]}, "describes a 'qwen3' model"),
        (speculators("eagle3", 7), "describes a 'eagle3' model"),
    ],
)
def test_what_we_do_not_compute_is_imported_all_the_same(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(config, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("projector_type", "mlp"),
        ("conv_kernel_size", 2),
        ("final_logit_softcapping", 30.0),
        ("input_embedding_scale", 8.0),
        ("attention_sink_bias", True),
    ],
)
def test_a_part_of_dflash_that_is_not_ours_is_dropped_in_silence(key: str, value: Any) -> None:
    inner = {**Z_LAB["dflash_config"], key: value}
    with pytest.raises(ValueError, match=rf"dflash_config\.{key} is {value!r}"):
        read_config({**Z_LAB, "dflash_config": inner})


def test_a_server_s_number_of_tokens_shortens_the_block() -> None:
    config = speculators("dspark", K + 1)
    with pytest.warns(UserWarning, match=f"speculative_tokens is {K} and left out: .* {K + 1}, "):
        assert read_config(config, 4).num_draft_tokens == K + 1


def test_a_target_that_scales_its_embeddings_gets_drafts_from_unscaled_ones(
    bf16_target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "theirs", Z_LAB, tensors_of(Z_LAB, bf16_target))
    monkeypatch.setattr(bf16_target, "embed", lambda ids: 8 * bf16_target.embed_weight_VD[ids])
    with pytest.raises(ValueError, match="scales its input embeddings"):
        load(folder, bf16_target)


def test_the_target_s_depth_is_guessed() -> None:
    config = {k: v for k, v in DEEPSPEC.items() if k != "num_target_layers"}
    assert read_config(config, 4) == read_config(DEEPSPEC)
    for lacking in (config, CONFIGS["speculators-dspark"]):
        with pytest.raises(ValueError, match=r"lacks num_target_layers.*--target TARGET"):
            read_config(lacking)


def test_a_confidence_head_is_left_out_without_a_word(
    bf16_target: TargetModel, tmp_path: Path
) -> None:
    tensors = tensors_of(DEEPSPEC, bf16_target)
    tensors["confidence_head.proj.weight"] = torch.ones(1, D + R).bfloat16()
    tensors["confidence_head.proj.bias"] = torch.ones(1).bfloat16()
    folder = write(tmp_path / "theirs", {**DEEPSPEC, "enable_confidence_head": True}, tensors)
    with pytest.warns(UserWarning, match=r"confidence head is left out: .* output is the same"):
        load(folder, bf16_target)


def test_copies_of_the_target_s_tables_are_dropped_unseen(
    bf16_target: TargetModel, tmp_path: Path
) -> None:
    tensors = tensors_of(DEEPSPEC, bf16_target)
    folder = write(tmp_path / "theirs", DEEPSPEC, tensors)
    with pytest.warns(UserWarning, match="embed_tokens.weight and lm_head.weight are left out"):
        load(folder)
    own = write(tmp_path / "own", DEEPSPEC, {**tensors, "lm_head.weight": torch.ones(V, D)})
    with pytest.warns(UserWarning, match="lm_head.weight differs from the target's"):
        load(own, bf16_target)
    short = {**tensors, "embed_tokens.weight": torch.ones(V - 1, D)}
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \[511, 64\], not"):
        load(write(tmp_path / "short", DEEPSPEC, short), bf16_target)


# ---- export ----------------------------------------------------------------------------------


def exported(target: TargetModel, layout: str, folder: Path, **changes: Any) -> None:
    config = DraftConfig.from_dict({**read_config(Z_LAB).to_dict(), **changes})
    export_history(DraftModel(config), folder, layout, target=target)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("z-lab", {"head": "markov"}, "holds only head='none', and this draft model has 'markov'"),
        ("z-lab", {"context": "taps"}, "holds only context='history'"),
        ("z-lab", {"history_window": 64}, "holds only history_window=0"),
        ("z-lab", {"qk_norm": False}, "holds only qk_norm=True"),
        ("z-lab", {"draft_vocab_size": 9}, "holds only pruned=False"),
        ("z-lab", {"mask_token_id": None}, "no learned placeholder vector"),
        ("z-lab", {"tap_ids": [0, 3]}, "reads layer 3, the target's last, before the final norm"),
        ("deepspec", {}, "holds only head='markov', and this draft model has 'none'"),
        ("deepspec", {"head": "markov"}, "holds only first_predictor='anchor'"),
        ("speculators", {"head": "tied"}, "holds only head='markov' or 'none'"),
        ("speculators", {"first_predictor": "anchor"}, "first_predictor='placeholder'"),
    ],
)
def test_an_export_loses_what_its_layout_cannot_say(
    bf16_target: TargetModel, tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exported(bf16_target, layout, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_freshly_made_model_has_something_that_no_layout_holds(tmp_path: Path) -> None:
    """Every parameter that training would move comes back from the export, to the bit."""
    model = DraftModel(read_config(Z_LAB))
    export_history(model, tmp_path / "out", "z-lab", dtype=torch.float32)
    stored = from_history_layout(read_tensors(tmp_path / "out"))
    assert stored.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(stored[name], p) for name, p in model.named_parameters())


def test_the_command_line_turns_one_layout_into_the_others(
    bf16_target: TargetModel, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tensors_of(DEEPSPEC, bf16_target)
    theirs, ours = write(tmp_path / "theirs", DEEPSPEC, tensors), tmp_path / "ours"
    target = ["--target", str(tiny_folder)]
    assert main(["export", str(theirs), str(ours), "--to", "dlite", *target]) == 0
    assert f"wrote {ours} in the dlite layout" in capsys.readouterr().out
    assert read(ours).target is not None and read(ours).dtype == "bfloat16"
    for layout in ("deepspec", "speculators"):
        out = tmp_path / layout
        assert main(["export", str(ours), str(out), "--to", layout]) == 2
        assert f"the {layout} layout names its target" in capsys.readouterr().err
        assert main(["export", str(ours), str(out), "--to", layout, *target]) == 0
        fc_weight = read_tensors(out)["fc.weight"]
        assert torch.equal(fc_weight, tensors["fc.weight"])
    assert main(["inspect", str(theirs)]) == 0
    assert "draft model, deepspec layout, bfloat16" in capsys.readouterr().out
