"""The architecture of openPangu-Embedded-1B, and published weights for it.

The model is a Llama with biases in attention, so that no remote code is needed to train it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import MissingExtraError, UsageError

NAME = "pangu-1b"


def pangu_config() -> Any:
    """Return the architecture as a ``transformers.LlamaConfig``.

    Raises:
        MissingExtraError: ``transformers`` is not installed.
    """
    try:
        from transformers import LlamaConfig
    except ImportError as error:
        raise MissingExtraError("rankscope study", "study") from error
    return LlamaConfig(
        vocab_size=153_376,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=26,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=128,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 4e6},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=False,
        use_cache=False,
    )


def build_pangu() -> nn.Module:
    """Return the model with random weights, about 1.156 B parameters.

    It is built on torch's current default device: under ``torch.device("meta")`` it takes no
    memory.
    """
    config = pangu_config()
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(config)
    return model


def load_published(weights: Path) -> tuple[nn.Module, Any]:
    """Return the model with published weights in fp32, and their tokenizer.

    Args:
        weights: Directory with ``*.safetensors`` files and a ``tokenizer.json`` or a
            ``tokenizer.model``. Code in it is never run.

    Raises:
        UsageError: A file is missing or damaged, or does not fit the architecture.
    """
    config = pangu_config()
    shards = sorted(weights.glob("*.safetensors"))
    if not shards:
        raise UsageError(
            f"expected published weights as *.safetensors files in {weights}, found none: "
            "check the directory"
        )
    tokenizer = _tokenizer(weights)
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"the tokenizer in {weights} has {len(tokenizer)} tokens, but {NAME} knows "
            f"{config.vocab_size}: these files do not belong together"
        )
    with torch.device("meta"):
        model = build_pangu()
    _assign(model, _read_shards(shards), weights)
    return model, tokenizer


def _read_shards(shards: list[Path]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        try:
            loaded = load_file(shard)
        except Exception as error:  # the library's error class is not public
            raise UsageError(f"{shard} cannot be read ({error}): fetch it again") from error
        tensors.update((name, value.float()) for name, value in loaded.items())
    return tensors


def _assign(model: Any, tensors: dict[str, torch.Tensor], weights: Path) -> None:
    """Put tensors into a model on the meta device; every name and shape must match."""
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise UsageError(
            f"{weights} holds a head that differs from the embedding, but {NAME} ties them: "
            "these are weights of another model"
        )
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    names = sorted(expected.keys() | found.keys())
    wrong = [name for name in names if expected.get(name) != found.get(name)]
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"{weights} does not fit {NAME}: {len(wrong)} tensors differ, the first is {name} "
            f"(expected {expected.get(name, 'none')}, found {found.get(name, 'none')})"
        )
    model.load_state_dict(tensors, strict=False, assign=True)  # the tied head has no entry
    model.tie_weights()
    rotary = model.model.rotary_emb  # its buffers are computed, not stored
    model.model.rotary_emb = type(rotary)(model.config)


def _tokenizer(weights: Path) -> Any:
    special = _special_tokens(weights)
    try:
        if (weights / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            fast: Any = PreTrainedTokenizerFast  # its constructor has no types
            return fast(tokenizer_file=str(weights / "tokenizer.json"), **special)
        if (weights / "tokenizer.model").is_file():
            return _sentencepiece(weights / "tokenizer.model", special)
    except MissingExtraError:
        raise
    except Exception as error:  # the libraries raise plain exceptions
        raise UsageError(f"the tokenizer in {weights} cannot be read: {error}") from error
    raise UsageError(
        f"expected a tokenizer.json or tokenizer.model in {weights}, found neither: "
        "fetch the tokenizer too"
    )


def _sentencepiece(path: Path, special: dict[str, str]) -> Any:
    try:
        import sentencepiece
        from transformers import SentencePieceBackend
    except ImportError as error:
        raise MissingExtraError("a tokenizer.model", "study") from error
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    own = {
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
    }
    defaults = {role: processor.id_to_piece(token) for role, token in own.items() if token >= 0}
    backend: Any = SentencePieceBackend  # its constructor has no types
    return backend(vocab_file=str(path), **{**defaults, **special})


def _special_tokens(weights: Path) -> dict[str, str]:
    """Read which tokens begin, end and pad a text, where a tokenizer_config.json says so."""
    path = weights / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): fetch it again") from error
    values = {
        role: config.get(role) for role in ("unk_token", "bos_token", "eos_token", "pad_token")
    }
    texts = {
        role: value.get("content") if isinstance(value, dict) else value
        for role, value in values.items()
    }
    return {role: text for role, text in texts.items() if isinstance(text, str)}
