"""Which model, and as what."""

from dataclasses import dataclass, field
from typing import Any

from octavo.config.options import option

__all__ = ["CHECKPOINT_QUANTIZATIONS", "QUANTIZED_WHILE_LOADING", "ModelConfig"]

# Names that stand for a way of quantizing → what config.json calls it.
CHECKPOINT_QUANTIZATIONS = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin", "cpu_awq"), "awq"),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), "gptq"),
    **dict.fromkeys(("fp8", "fbgemm_fp8"), "fp8"),
    "compressed-tensors": "compressed-tensors",
}
# What a checkpoint that is not quantized can be made into → the type that its weights are then kept as.
QUANTIZED_WHILE_LOADING = {"int8": "Q8_0", "int4": "Q4_1"}
_WEIGHTS = (
    "octavo reads AWQ, GPTQ, compressed-tensors, FP8 and GGUF; take such a form of the model, or quantize it while "
    "loading: int8 or int4"
)
_QUANTIZATIONS = (
    *("auto-round", "bitblas", "bitsandbytes"),
    *("deepspeedfp", "experts_int8", "fp8_per_block", "fp8_per_tensor", "fp_quant"),
    *("gptq_bitblas", "gptq_marlin_24", "hqq", "inc", "int8_per_channel", "ipex"),
    *("marlin", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16", "mxfp4", "mxfp8", "nvfp4"),
    *("petit_nvfp4", "ptpc_fp8", "quark", "rtn", "torchao", "tpu_int8"),
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Attributes beside the flags: ``path``, ``architecture``, ``hf_config``, … from ModelFacts.

    ``hf_config`` is config.json with ``hf_overrides`` merged in, checked.
    ``tokenizer_path``: what the tokenizer is loaded from; ``path`` unless ``--tokenizer`` was stated.
    ``default_sampling_params``: values that SamplingParams fields have where a request states none: those of
    temperature, top_p, top_k, min_p, repetition_penalty and max_tokens that the model's generation_config.json or
    ``--override-generation-config`` names.
    """

    model: str = option("alias, local folder, .gguf file or hub name")
    tokenizer: str | None = option(
        "tokenizer to use: folder, .gguf file, alias or hub name (default: MODEL's own)", metavar="TOKENIZER"
    )
    revision: str | None = option("branch, tag or commit of MODEL on the hub (default: its main branch)")
    tokenizer_revision: str | None = option("the same for --tokenizer", metavar="REVISION")
    dtype: str = option(
        "data type of weights and activations; auto: the checkpoint's, where this machine computes in it",
        default="auto",
        choices=("auto", "bfloat16", "float32", "float16"),
        refused={"half": "say float16", "float": "say float32"},
    )
    quantization: str = option(
        "how the checkpoint's weights are quantized; it must be so. auto: as MODEL says. int8, int4: quantize them "
        "while loading",
        default="auto",
        short="-q",
        choices=("auto", "none", "gguf", *QUANTIZED_WHILE_LOADING, *CHECKPOINT_QUANTIZATIONS),
        refused=dict.fromkeys(_QUANTIZATIONS, f"not there yet: {_WEIGHTS}"),
    )
    quantized_products: str = option(
        "how matrices that stay quantized are multiplied. integers: inputs are rounded to 8 bits; fastest for few "
        "streams. bfloat16 (with AMX): weights are widened beside the products and inputs are not rounded; faster for "
        "prompts and many streams. auto: bfloat16 where it can be and --max-num-seqs is more than 4",
        default="auto",
        choices=("auto", "integers", "bfloat16"),
    )
    max_model_len: int = option(
        "longest prompt plus output, tokens (default, or auto: what model and memory allow)",
        unstated=("auto", -1),
        least=2,  # a token of prompt and one of output
        most=2**31 - 1,
    )
    served_model_name: list[str] = option("names that the API answers to (default: MODEL as given)")
    seed: int = option(
        "seed that requests without one derive theirs from (default: drawn at start-up)", least=-(2**63), most=2**63 - 1
    )
    hf_overrides: dict[str, Any] = option("merged into config.json before it is checked", default={})
    generation_config: str = option(
        "sampling defaults: auto: the model's generation_config.json; vllm: none but the API's; or a folder with such "
        "a file",
        default="auto",
        metavar="{auto,vllm,FOLDER}",
    )
    override_generation_config: dict[str, Any] = option(
        "sampling defaults that go before the model's, as {\"temperature\": 0.5}; null: the API's default", default={}
    )
    max_logprobs: int = option(
        "most logprobs that a request may ask for; -1: the whole vocabulary", default=20, least=-1, most=2**31 - 1
    )
    logits_processors: list[str] = option(
        "custom logits processors, as module:Class", default=[], metavar="MODULE:CLASS"
    )

    path: str = ""
    tokenizer_path: str = ""
    architecture: str = ""
    hf_config: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    max_model_len_stated: bool = False
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
