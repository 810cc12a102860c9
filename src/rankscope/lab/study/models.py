"""The models of a study, each with its tokenizer and a label."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import MissingExtraError, UsageError
from rankscope.files import parse, read_file
from rankscope.lab.study.base import BASE_STEPS, load_base, train_tokenizer
from rankscope.lab.study.config import StudyConfig
from rankscope.lab.study.data import Record, load_records
from rankscope.lab.study.encoding import EncodedSet, check_enough_samples, encode
from rankscope.lab.study.quiet import quiet_transformers, reason

TINY = "tiny"
PANGU = "pangu-1b"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model that is ready to be fine-tuned.

    ``model`` is a transformers model in fp32, in training mode; its tokenizer has an end and a
    padding token; ``num_parameters`` counts tied ones once.
    """

    model: nn.Module
    tokenizer: Any
    label: str
    num_parameters: int


def load_model(
    spec: str,  # ``"tiny"``, ``"pangu-1b"``, or a Hugging Face name or directory
    *,
    weights: Path | None = None,  # directory of published ones and tokenizer, for ``pangu-1b`` only
    seed: int = 0,  # decides random weights
    tokenizer_records: Sequence[Record] = (),
    cache_dir: Path | None = None,  # of base models; None: the user's
    base_steps: int = BASE_STEPS,  # of the tiny model's base training
) -> LoadedModel:
    """Load a model by name, on the CPU.

    The built-in tokenizer learns from ``tokenizer_records``, which are held out, and the tiny
    model's base training runs on them.
    """
    with quiet_transformers():
        if spec == TINY:
            model, tokenizer = load_base(
                tokenizer_records, seed=seed, steps=base_steps, cache_dir=cache_dir
            )
            label = "tiny (built-in base)" if base_steps else "tiny (random weights)"
        elif spec == PANGU and weights is not None:
            model, tokenizer = load_published(weights)
            label = f"{PANGU} (weights from {weights.name})"
        elif spec == PANGU:
            tokenizer = train_tokenizer(tokenizer_records)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = build_pangu()
            label = f"{PANGU} (random weights)"
        else:
            model, tokenizer = _hugging_face(spec)
            label = spec
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer of {spec!r} has no end token: choose another model")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.train()
    count = sum(parameter.numel() for parameter in model.parameters())
    return LoadedModel(model, tokenizer, label, count)


def _hugging_face(spec: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            spec, trust_remote_code=False, dtype=torch.float32
        )
    except Exception as error:  # the library raises what its backends raise
        raise UsageError(
            f"the model {spec!r} cannot be loaded ({reason(error)}): use {TINY}, {PANGU}, "
            "or a Hugging Face directory or name that needs no remote code"
        ) from error
    model.config.use_cache = False
    return model, tokenizer


def pangu_config() -> Any:
    """Return the architecture of openPangu-Embedded-1B as a ``transformers.LlamaConfig``."""
    from transformers import LlamaConfig

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
    """Return the model with random weights, about 1.156 B parameters."""
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(pangu_config())
    return model


def load_published(weights: Path) -> tuple[nn.Module, Any]:
    """Return the model with published weights in fp32, and their tokenizer.

    The directory holds ``*.safetensors`` files and a ``tokenizer.json`` or a ``tokenizer.model``;
    code in it is never run. UsageError if a file is missing, damaged, or does not fit.
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
            f"the tokenizer in {weights} has {len(tokenizer)} tokens, but {PANGU} knows "
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
    embedding = tensors.get("model.embed_tokens.weight")
    head = tensors.get("lm_head.weight")
    if head is None and embedding is not None:
        tensors["lm_head.weight"] = embedding
    elif head is not None and embedding is not None and not torch.equal(head, embedding):
        raise UsageError(
            f"{weights} holds a head that differs from the embedding, but {PANGU} ties them: "
            "these are weights of another model"
        )
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise UsageError(f"{weights} does not fit {PANGU}: {reason(error)}") from error
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
    """Read the begin, end and padding tokens from a tokenizer_config.json, where there is one."""
    path = weights / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = parse(read_file(path))
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


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The data of each worker; the base model comes from ``held_out``; ``facts`` are recorded."""

    held_out: Sequence[Record]
    samples: EncodedSet
    facts: dict[str, Any]


def prepare(config: StudyConfig) -> PreparedModel:
    """Load the data, train or find the base model, and encode the samples."""
    records = load_records(config.data, seed=config.seed, limit=config.limit)
    _check_enough(config, len(records.records))  # before the base model is trained
    loaded = load(config, records.held_out)
    samples = encode(records.records, loaded.tokenizer, config.max_length)
    _check_enough(config, len(samples))
    facts = {
        "model": loaded.label,
        "num_parameters": loaded.num_parameters,
        "data": records.name,
        "data_digest": records.digest,
        "records": records.total,
        "samples": len(samples),
        "skipped_empty": records.skipped_empty,
        "skipped_truncated": samples.skipped_truncated,
        "truncated": samples.truncated,
    }
    return PreparedModel(records.held_out, samples, facts)


def _check_enough(config: StudyConfig, num_samples: int) -> None:
    for reading in config.readings:
        check_enough_samples(reading, num_samples, config.batch_size, config.workers)


def load(config: StudyConfig, held_out: Sequence[Record]) -> LoadedModel:
    """Load a fresh copy of the study's base model, on the CPU."""
    return load_model(
        config.model,
        weights=Path(config.weights) if config.weights else None,
        seed=config.seed,
        tokenizer_records=held_out,
    )
