"""Facts of a rank's environment: which may differ between ranks, which do, which are secret."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rankscope.bus.finding import Severity
from rankscope.bus.replicas import minority_ranks, name_values
from rankscope.bus.words import name_ranks
from rankscope.stats.arrays import digest_of

PACKAGES = (
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch-lightning",
    "trl",
    "peft",
    "datasets",
    "tokenizers",
    "triton",
    "flash-attn",
)
"""Packages whose versions are recorded where they are installed."""

OWN = frozenset(
    {
        "device_memory",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "LOCAL_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ASCEND_DEVICE_ID",
        "ASCEND_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "NCCL_HOSTID",
    }
)
"""Facts in which ranks may differ in a healthy job."""

PLACES = ("_DIR", "_HOME", "_PATH", "_CACHE", "_FILE", "_IFNAME", "_HCA")
"""Endings of variables that name a place, which every host may have elsewhere."""

DECIDES_BITS = frozenset({"NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"})
"""Variables that change the precision of what is computed, not only how fast."""

HARMLESS = frozenset({"driver", "cpu_capability"})
"""Facts in which hosts may differ in a healthy job."""


TYPE_FLAGS = (
    "default_dtype",
    "float32_matmul",
    "tf32_matmul",
    "tf32_convolutions",
    "reduced_fp16_sums",
    "reduced_bf16_sums",
)
"""Settings of torch that decide in which type is computed."""

KERNEL_FLAGS = (
    "deterministic_algorithms",
    "cudnn_deterministic",
    "cudnn_benchmark",
    "cudnn",
    "mkldnn",
    "mkldnn_matmul",
    "attention_fast_path",
    "attention_backends",
)
"""Settings of torch that decide by which kernels; ``mkldnn_matmul`` decides on the type, too."""


def precision_digest(settings: Mapping[str, str | bool]) -> int:
    """Return the digest of a forward pass's precision: types, autocast, then torch's settings."""
    return digest_of(repr(tuple(settings.values())).encode())


def is_compared(name: str) -> bool:
    """Return whether a fact should be equal on all ranks."""
    return name not in OWN and not (name.isupper() and name.endswith(PLACES))


_FAMILIES = {
    "NCCL": """ALGO ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE
        CHECK_POINTERS COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING CONF_FILE CROSS_NIC
        CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS DMABUF_ENABLE GDR_FLUSH_DISABLE GRAPH_FILE
        GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE
        IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS
        IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL
        IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY LAUNCH_MODE LL128_BUFFSIZE
        LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS
        MAX_P2P_NCHANNELS MAX_NRINGS MIN_CTAS MIN_NCHANNELS MIN_P2P_NCHANNELS MIN_NRINGS
        MNNVL_ENABLE NET NET_FORCE_FLUSH NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NET_SHARED_BUFFERS
        NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE P2P_DIRECT_DISABLE
        P2P_DISABLE P2P_LEVEL P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROFILER_PLUGIN PROTO PXN_DISABLE
        RAS_ENABLE SET_STACK_SIZE SHM_DISABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME
        SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC TOPO_FILE TREE_THRESHOLD TUNER_CONFIG_FILE
        TUNER_PLUGIN WIN_ENABLE WORK_FIFO_DEPTH""",
    "GLOO": "DEVICE_TRANSPORT SOCKET_IFNAME",
    "HCCL": """ALGO BUFFSIZE CONNECT_TIMEOUT DETERMINISTIC EXEC_TIMEOUT IF_BASE_PORT IF_IP
        INTRA_PCIE_ENABLE INTRA_ROCE_ENABLE OP_EXPANSION_MODE RDMA_RETRY_CNT RDMA_SL RDMA_TC
        RDMA_TIMEOUT SOCKET_FAMILY SOCKET_IFNAME WHITELIST_DISABLE""",
    "CUDA": """CACHE_DISABLE CACHE_MAXSIZE CACHE_PATH DEVICE_MAX_CONNECTIONS DEVICE_ORDER
        DISABLE_PTX_JIT FORCE_PTX_JIT HOME LAUNCH_BLOCKING MODULE_LOADING
        MPS_ACTIVE_THREAD_PERCENTAGE PATH SCALE_LAUNCH_QUEUES VERSION VISIBLE_DEVICES""",
    "CUBLAS": "WORKSPACE_CONFIG EMULATE_SINGLE_PRECISION EMULATION_STRATEGY",
    "CUBLASLT": "WORKSPACE_SIZE",
    "CUDNN": "CONVTS_DISABLE FORCE_KERNEL_INIT FRONTEND_ATTN_DP_WORKSPACE_LIMIT",
    "HIP": "FORCE_DEV_KERNARG LAUNCH_BLOCKING VISIBLE_DEVICES",
    "ROCR": "VISIBLE_DEVICES",
    "HSA": """DISABLE_FRAGMENT_ALLOCATOR ENABLE_SDMA FORCE_FINE_GRAIN_PCIE NO_SCRATCH_RECLAIM
        OVERRIDE_GFX_VERSION XNACK""",
    "ASCEND": """DEVICE_ID GLOBAL_LOG_LEVEL LAUNCH_BLOCKING RT_VISIBLE_DEVICES VISIBLE_DEVICES""",
    "TORCH": """ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT BLAS_PREFER_HIPBLASLT COMPILE_DEBUG
        COMPILE_DISABLE CPP_LOG_LEVEL CUDA_ARCH_LIST CUDNN_V8_API_DISABLED
        CUDNN_V8_API_LRU_CACHE_LIMIT DISTRIBUTED_DEBUG FR_BUFFER_SIZE HOME
        LINALG_PREFER_CUSOLVER LOGS NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS
        NCCL_BLOCKING_WAIT NCCL_CUDA_EVENT_CACHE NCCL_DESYNC_DEBUG NCCL_DUMP_ON_TIMEOUT
        NCCL_ENABLE_MONITORING NCCL_ENABLE_TIMING NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY
        NCCL_NAN_CHECK NCCL_TRACE_BUFFER_SIZE NCCL_USE_COMM_NONBLOCKING
        ROCM_AOTRITON_ENABLE_EXPERIMENTAL SHOW_CPP_STACKTRACES
        TENSOREXPR_FALLBACK USE_CUDA_DSA USE_RTLD_GLOBAL""",
    "TORCHINDUCTOR": """CACHE_DIR COMPILE_THREADS COORDINATE_DESCENT_TUNING CPP_WRAPPER CUDAGRAPHS
        EMULATE_PRECISION_CASTS FREEZING FX_GRAPH_CACHE MAX_AUTOTUNE MAX_AUTOTUNE_GEMM
        MAX_AUTOTUNE_GEMM_BACKENDS MAX_AUTOTUNE_POINTWISE""",
    "TORCHDYNAMO": "DISABLE INLINE_INBUILT_NN_MODULES VERBOSE",
    "PYTORCH": """ALLOC_CONF CUDA_ALLOC_CONF ENABLE_MPS_FALLBACK HIP_ALLOC_CONF JIT
        MPS_HIGH_WATERMARK_RATIO MPS_LOW_WATERMARK_RATIO NO_CUDA_MEMORY_CACHING NPU_ALLOC_CONF
        NVML_BASED_CUDA_CHECK TUNABLEOP_ENABLED TUNABLEOP_FILENAME TUNABLEOP_TUNING""",
    "TRITON": "CACHE_DIR DEFAULT_BACKEND F32_DEFAULT INTERPRET PTXAS_PATH",
    "OMP": """DYNAMIC MAX_ACTIVE_LEVELS NESTED NUM_THREADS PLACES PROC_BIND SCHEDULE STACKSIZE
        THREAD_LIMIT WAIT_POLICY""",
    "MKL": """CBWR DEBUG_CPU_TYPE DYNAMIC ENABLE_INSTRUCTIONS INTERFACE_LAYER NUM_THREADS
        SERVICE_FORCE_INTEL THREADING_LAYER""",
    "HF": """DATASETS_CACHE DATASETS_IN_MEMORY_MAX_SIZE DATASETS_OFFLINE DATASETS_TRUST_REMOTE_CODE
        ENDPOINT HOME HUB_CACHE HUB_DISABLE_XET HUB_ENABLE_HF_TRANSFER HUB_OFFLINE
        MODULES_CACHE""",
    "TRANSFORMERS": "CACHE NO_ADVISORY_WARNINGS OFFLINE VERBOSITY",
    "ACCELERATE": """CONFIG_FILE DEBUG_MODE DEEPSPEED_ZERO_STAGE DISPATCH_BATCHES
        DOWNCAST_BF16 DYNAMO_BACKEND DYNAMO_MODE DYNAMO_USE_DYNAMIC DYNAMO_USE_FULLGRAPH
        EVEN_BATCHES GRADIENT_ACCUMULATION_STEPS MIXED_PRECISION SPLIT_BATCHES TORCH_DEVICE USE_CPU
        USE_DEEPSPEED USE_FSDP USE_SEEDABLE_SAMPLER""",
    "DEEPSPEED": "LOG_LEVEL TIMEOUT",
}
"""Endings of variables' names, by their beginnings."""

VARIABLES = frozenset(
    {
        "GROUP_RANK",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NVIDIA_TF32_OVERRIDE",
        "PYTHONHASHSEED",
        "RANK",
        "TOKENIZERS_PARALLELISM",
        "WORLD_SIZE",
        *(f"{family}_{rest}" for family, rests in _FAMILIES.items() for rest in rests.split()),
    }
)
"""Environment variables that decide how a job computes or communicates; no others are recorded."""

HIDDEN = "…"
"""Recorded in place of a secret."""

_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)(?:\S*@)?([^\s/?#\\]+)[^\s]*", re.IGNORECASE)
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|passcode|credential|authoriz|bearer|cookie|signature"
    r"|connection_?string|(api|access|account|private|ssh|encryption|signing|license)_?key"
    r"|(^|_)(auth|dsn|jwt|key|pass|pat|pwd|sas|tokens?|webhook)(_(id|file|url|value|str|\d+))?$",
    re.IGNORECASE,
)
_NAMED = (
    r"[\w-]*(?:secret|passw(?:or)?d|passphrase|credential|authorization|token|[is][_-]?key)[\w-]*"
)
_NAMED_VALUE = re.compile(
    rf"(--{_NAMED}[ =]|\b{_NAMED}['\"]?\s*[=:]\s*)"
    r"(['\"]?)(?!\d+\b|None\b)(?:(?:apikey|basic|bearer|digest|token)\s+)?[^\s'\",)]+",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<![\w/])[A-Za-z_][\w.+-]*:[^\s:@/]+@(?=[\w-])")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [^-]*-----|\Z)", re.DOTALL
)
_ISSUED = re.compile(
    r"\b(?:hf_|gh[opusr]_|github_pat_|glpat-|sk-|sk_live_|rk_live_|xox[abeoprs]-|npm_|pypi-"
    r"|wandb_v1_|AIza|AKIA|ASIA|eyJ[\w-]+\.eyJ)[\w.-]{12,}"
)
"""Beginnings by which issuers mark their tokens, so that scanners find them.

A kept library knows more of them (detect-secrets), but reads files by lines, and brings packages
that a training does not need (PyYAML, requests).
"""

_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_MARKS_OF_TEXT = re.compile(
    r"^(additional|bos|cls|eos|image|mask|max|pad|sep|special|unk)_tokens?$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def without_addresses(text: str) -> str:
    """Return text whose URLs are cut down to the host: user, path and query may be secrets."""
    return _URL.sub(lambda found: f"{found[1]}{found[2]}/{HIDDEN}", text)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a user's plain JSON value with all likely secrets hidden.

    Text is hidden if ``name``, the name of the value, is that of a secret; in a list of arguments,
    the name is the argument before it.
    """
    if isinstance(value, Mapping):
        hidden = name if _is_secret(name) else ""
        return {key: without_secrets(item, hidden or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if _is_secret(name):
            return [without_secrets(item, name) for item in value]
        flags = ["", *map(_flag, value)]
        return [
            without_secrets(item, name if _flag(item) else flag or name)
            for item, flag in zip(value, flags, strict=False)
        ]
    if not isinstance(value, str):
        return value
    if _is_secret(name):
        return HIDDEN
    text = _NAMED_VALUE.sub(rf"\1\2{HIDDEN}", _PRIVATE_KEY.sub(HIDDEN, value))
    return without_addresses(_USER.sub(f"{HIDDEN}@", _ISSUED.sub(HIDDEN, text)))


def _flag(argument: Any) -> str:
    """Return the name of a flag that may have its value in the next argument; else nothing."""
    found = isinstance(argument, str) and _FLAG.fullmatch(argument)
    return found[1] if found else ""


def _is_secret(name: str) -> bool:
    words = _CAMEL.sub("_", name).replace("-", "_").replace(".", "_").lower()
    return bool(_SECRET.search(words)) and not _MARKS_OF_TEXT.match(words)


_OF_A_RANK = """
address addr cache checkpoint cpu cuda cwd date debug device devices dir directory endpoint eval
evaluation file files folder gpu gpus home host hostname hub id ip leader local log logger logging
logs main memory metrics node path paths pid port predict print process progress project rank ranks
report root run save shard started tensorboard test time timestamp tqdm trackio uri url user
username uuid validation verbose verbosity wandb
"""
_OF_SPEED = """
backend batch bucket checkpointing compile dataloader loader persistent pin prefetch threads timeout
workers
"""
_THAT_DECIDE = """
accumulation alpha beta beta1 beta2 betas bf16 clip coef decay dropout dtype epochs eps epsilon fp16
gamma grad gradient learning loss lr momentum norm optim optimizer precision rate regularization
schedule scheduler smoothing steps temperature warmup weight
"""
_OWN_WORDS = frozenset(_OF_A_RANK.split())
"""Words in the names of settings in which ranks of a healthy job may differ."""

_HARMLESS_WORDS = frozenset(_OF_SPEED.split())
"""Words in the names of settings that decide how fast, or how much at once."""

_DECISIVE_WORDS = frozenset(_THAT_DECIDE.split())
"""Words in the names of a user's own settings that decide what a training computes."""

OF_USER = "config"
"""What the names of a user's own settings begin with."""

_MOST_SETTINGS = 512
_LONGEST_SETTING = 200

Setting = bool | int | float | str


def plain_settings(values: Any, name: str) -> dict[str, Setting]:
    """Return nested settings that should be equal on all ranks by dotted name.

    Left out are those whose name is one of a rank, and text that is a place. Secrets are hidden.
    """
    found: dict[str, Setting] = {}
    waiting = [(name, without_secrets(values))]
    while waiting and len(found) < _MOST_SETTINGS:
        at, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{at}.{key}", item) for key, item in reversed([*value.items()])]
        elif isinstance(value, list | tuple):
            waiting += [(f"{at}.{number}", each) for number, each in reversed([*enumerate(value)])]
        elif _words_of(at).isdisjoint(_OWN_WORDS):
            text = value if isinstance(value, bool | int | float | str) else str(value)
            is_place = isinstance(text, str) and ("/" in text or "\\" in text)
            found |= {} if is_place else {at: text[:_LONGEST_SETTING] if _is_text(text) else text}
    return found


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _words_of(setting: str) -> set[str]:
    """Return the words of a setting's dotted name, but for its first part."""
    own = setting.partition(".")[2]
    return set(re.split(r"[^a-z0-9]+", _CAMEL.sub("_", own).lower()))


def different_settings(
    settings_W: Sequence[Mapping[str, Setting]],
) -> list[dict[str, Setting]]:
    """Return each rank's settings, those alone that differ between ranks that have them.

    A user's setting that is every rank's own number is none of the training's.
    """
    names = dict.fromkeys(name for each in settings_W for name in each)
    different: dict[str, None] = {}
    for name in names:
        values = [each.get(name) for each in settings_W]
        own = name.startswith(OF_USER) and values == [*range(len(values))]
        if len(set(values) - {None}) > 1 and not own:
            different[name] = None
    return [{name: each[name] for name in different if name in each} for each in settings_W]


def compare_settings(
    settings_W: Sequence[Mapping[str, Setting]],
) -> tuple[tuple[int, ...], tuple[str, ...], Severity]:
    """Return the ranks that differ, the settings in words, serious first, and the severity."""
    names = list(dict.fromkeys(name for each in settings_W for name in each))
    known = {name.rpartition(".")[2] for name in names if not name.startswith(OF_USER)}
    serious: list[str] = []
    harmless: list[str] = []
    ranks: set[int] = set()
    for name in names:
        owner, _, field = name.partition(".")
        by_user = owner == OF_USER
        values = [each.get(name) for each in settings_W]
        minority = minority_ranks(values)
        if not minority or (by_user and field.rpartition(".")[2] in known):
            continue
        ranks.update(minority)
        words = [None if value is None else str(value) for value in values]
        found = _words_of(name)
        decides = found & _DECISIVE_WORDS if by_user else not found & _HARMLESS_WORDS
        text = f"{field} of {owner} is {name_values(words)}"
        (serious if decides else harmless).append(text)
    severity = Severity.WARNING if serious else Severity.NOTE
    return tuple(sorted(ranks)), (*serious, *harmless), severity


_TITLES = {"revision": "source revision", "revision_changed": "source files"}


def compare_facts(
    facts: Sequence[Mapping[str, Any]],
) -> tuple[tuple[int, ...], tuple[str, ...], Severity]:
    """Return the ranks that differ, the differences in words, serious first, and the severity."""
    names = sorted(filter(is_compared, {name for own in facts for name in own}))
    serious: list[str] = []
    harmless: list[str] = []
    ranks: set[int] = set()
    for name in names:
        values = [_fact(own, name) for own in facts]
        minority = minority_ranks(values)
        if not minority:
            continue
        ranks.update(minority)
        note = name in HARMLESS or (name.isupper() and name not in DECIDES_BITS)
        (harmless if note else serious).append(_difference_of(name, values, minority))
    severity = Severity.WARNING if serious else Severity.NOTE
    return tuple(sorted(ranks)), (*serious, *harmless), severity


def _fact(facts: Mapping[str, Any], name: str) -> str | int | bool | None:
    """Return a fact; None where it is unknown, so that it is not compared."""
    if not facts:
        return None
    value = facts.get(name)
    if isinstance(value, str | int):
        return value
    if name.isupper():
        return "not set"
    return "not installed" if name in PACKAGES else None


def _difference_of(name: str, values: Sequence[str | int | bool | None], odd: Sequence[int]) -> str:
    if name == "vocabulary":
        return f"another vocabulary on {name_ranks(odd)}"
    words = [None if value is None else _word(name, value) for value in values]
    title = _TITLES.get(name, name.replace("_", " ") if name.islower() else name)
    return f"{title} {name_values(words)}"


def _word(name: str, value: str | int | bool) -> str:
    if name == "revision_changed":
        return "changed since the commit" if value else "unchanged"
    if name == "revision":
        return str(value)[:10]
    return ("off", "on")[value] if isinstance(value, bool) else str(value)
