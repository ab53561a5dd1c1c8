# csrc/cpu/bindings.cpp. Addresses are those of contiguous rows; types: 0 float32, 1 bfloat16.

LAYOUT_VERSION: int

def available_levels() -> list[str]: ...
def refused_levels() -> list[tuple[str, str]]: ...
def choose(level: str, threads: int, /) -> None: ...
def kernel_seconds() -> float: ...
def stream(data: int, bytes: int, /) -> None: ...
def multiply_bf16() -> int: ...
def multiply_f32() -> int: ...
def multiply_int8() -> int: ...
def packed_bytes(type: int, out_size: int, in_size: int, gated: bool, /) -> int: ...
def pack(
    type: int,
    weight: int,
    first_row: int,
    rows: int,
    out_size: int,
    in_size: int,
    gated: bool,
    packed: int,
    /,
) -> None: ...

# Weights of bfloat16 whose exponents are coded (csrc/cpu/coded.hpp); 0 bytes: not at this level, or not this shape.
def coded_bytes(out_size: int, in_size: int, gated: bool, /) -> int: ...
def encode(packed: int, out_size: int, in_size: int, gated: bool, coded: int, /) -> bool: ...

# Quantized weights: format and span as in csrc/cpu/formats.hpp, 0 and 0 for plain ones.
def half_scale(format: int, span: int, packed: int, out_size: int, in_size: int, gated: bool, /) -> float: ...
def packed_block_bytes(format: int, span: int, out_size: int, in_size: int, gated: bool, /) -> int: ...
def file_row_bytes(format: int, span: int, in_size: int, /) -> int: ...
def pack_blocks(
    format: int,
    span: int,
    rows: int,
    first_row: int,
    count: int,
    out_size: int,
    in_size: int,
    gated: bool,
    packed: int,
    /,
) -> None: ...
def quantize(type: int, x: int, format: int, blocks: int, rows: int, in_size: int, /) -> bool: ...
def dequantize(type: int, blocks: int, count: int, values: int, /) -> None: ...

class Recording:
    def __init__(self, rows: int, requests: int, /) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def same_calls(self, other: Recording, /) -> bool: ...
    def kernels(self) -> list[str]: ...
    def run(self, rows: int, requests: int, /) -> None: ...

def embedding(
    type: int,
    ids: int,
    format: int,
    span: int,
    weight: int,
    scale: float,
    out_type: int,
    out: int,
    rows: int,
    size: int,
    vocabulary: int,
    /,
) -> None: ...
def linear(
    type: int,
    x: int,
    x_stride: int,
    format: int,
    span: int,
    weight: int,
    bias: int,
    out: int,
    out_stride: int,
    out_type: int,
    rows: int,
    in_size: int,
    out_size: int,
    residual: int,
    multiplier: float,
    softcap: float,
    gated: bool,
    function: int,
    half_scale: float,
    /,
) -> None: ...
def norm(
    type: int,
    x: int,
    x_stride: int,
    weight_type: int,
    weight: int,
    bias: int,
    head_weights: bool,
    residual: int,
    out_type: int,
    out: int,
    rows: int,
    heads: int,
    size: int,
    eps: float,
    center: bool,
    /,
) -> None: ...
def cast(type: int, x: int, x_stride: int, out_type: int, out: int, rows: int, size: int, /) -> None: ...
def reorder(type: int, x: int, x_stride: int, order: int, back: bool, out: int, rows: int, size: int, /) -> None: ...
def activation(type: int, function: int, x: int, x_stride: int, out: int, rows: int, size: int, /) -> None: ...

# Type, what is kept (0: that type, 1: int8, 2: fp8), data, blocks, block size, heads, head size.
_Cache = tuple[int, int, int, int, int, int, int]

def rotary_kv(
    cache: _Cache,
    positions: int,
    query: int,
    query_stride: int,
    key: int,
    key_stride: int,
    value: int,
    value_stride: int,
    cos_sin: int,
    slots: int,
    out: int,
    rows: int,
    query_heads: int,
    rotary_dim: int,
    max_position: int,
    /,
) -> None: ...
def store_kv(
    cache: _Cache,
    key: int,
    key_stride: int,
    value: int,
    value_stride: int,
    slots: int,
    rows: int,
    /,
) -> None: ...
def attention(
    cache: _Cache,
    query: int,
    query_stride: int,
    out: int,
    query_start: int,
    seq_lens: int,
    block_table: int,
    table_stride: int,
    table_width: int,
    requests: int,
    rows: int,
    query_heads: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: int,
    /,
) -> None: ...
def sample(
    logits: int,
    stride: int,
    rows: int,
    vocabulary: int,
    parameters: tuple[int, ...],
    num_changes: int,
    changes: tuple[int, ...],
    logprobs: tuple[int, ...],
    tokens: int,
    status: int,
    /,
) -> None: ...
def score(
    logits: int,
    stride: int,
    rows: int,
    vocabulary: int,
    logprobs: tuple[int, ...],
    tokens: int,
    status: int,
    /,
) -> None: ...

class StepInputs:
    def fill(self, rows: list[int], num_scheduled: list[int], /) -> tuple[int, int, int, int]: ...
    def append_tokens(self, rows: list[int], token_ids: list[int], /) -> None: ...
    def gather(self, data: int, row_bytes: int, count: int, /) -> None: ...

def step_inputs(
    batch: list[int],
    max_rows: int,
    max_model_len: int,
    step: list[int],
    max_tokens: int,
    max_reqs: int,
    groups: list[tuple[int, int, int, int, int]],
    /,
) -> StepInputs: ...

class FusedStep:
    def __init__(
        self,
        inputs: StepInputs,
        columns: tuple[int, ...],
        forward: Recording,
        hidden: tuple[int, int],
        logits: Recording,
        scores: tuple[int, int],
        vocabulary: int,
        /,
    ) -> None: ...
    def run(
        self, rows: list[int], num_computed: list[int], num_output: list[int], num_scheduled: list[int], /
    ) -> list[int]: ...
