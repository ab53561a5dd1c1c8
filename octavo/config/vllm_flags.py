"""vLLM's flags that octavo does not have. Each is refused by name, with the reason or what to use instead; only a value
that asks for nothing is taken, and that is said.

A flag is written ``name``, ``name?`` (a switch, without a value) or ``-s/name`` (with a short name); ``=a|b`` are the
values that ask for nothing. A switch that is off asks for nothing where no value is named.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["AbsentFlag", "absent_flags"]

_TABLE: list[tuple[str, str]] = [
    (
        "octavo runs no code from a checkpoint; leave the flag out: what octavo supports needs none",
        "trust-remote-code? code-revision model-class-overrides={}",
    ),
    (
        "octavo runs on one device so far; start one server for each and put a load balancer before them",
        "-tp/tensor-parallel-size=1 -pp/pipeline-parallel-size=1 -dp/data-parallel-size=1 "
        "-dpl/data-parallel-size-local=1 -dpr/data-parallel-start-rank=0 -dpn/data-parallel-rank=0 "
        "-dpa/data-parallel-address -dpp/data-parallel-rpc-port -dpb/data-parallel-backend=mp "
        "-dph/data-parallel-hybrid-lb? -dpe/data-parallel-external-lb? data-parallel-multi-port-external-lb? "
        "data-parallel-supervisor-port dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s -dcp/decode-context-parallel-size=1 -pcp/prefill-context-parallel-size=1 "
        "cp-kv-cache-interleave-size=1 dcp-kv-cache-interleave-size=1 dcp-comm-backend -n/nnodes=1 "
        "-r/node-rank=0 master-addr master-port headless? distributed-timeout-seconds "
        "cpu-distributed-timeout-seconds disable-custom-all-reduce?=true|false "
        "disable-nccl-for-dp-synchronization?=true|false ray-workers-use-nsight? "
        "max-parallel-loading-workers worker-use-ray? engine-use-ray? "
        "enable-elastic-ep? enable-fault-tolerance? fault-tolerance-config device-ids "
        "aggregate-engine-logging?=true|false fail-on-environ-validation?",
    ),
    (
        "octavo runs on CPUs so far",
        "device=cpu|auto",
    ),
    (
        "octavo has no mixture-of-experts models yet",
        "-ep/enable-expert-parallel? enable-eplb? eplb-config expert-placement-strategy=linear all2all-backend "
        "moe-backend=auto enable-ep-weight-filter? enable-return-routed-experts? enable-bf16x3-router-gemm? "
        "num-redundant-experts=0 enable-dbo? ubatch-size=0 dbo-decode-token-threshold dbo-prefill-token-threshold",
    ),
    (
        "octavo has no LoRA adapters yet; serve a model that the adapter has been merged into",
        "enable-lora? enable-lora-bias? lora-modules max-loras max-lora-rank max-cpu-loras lora-dtype=auto "
        "lora-target-modules lora-extra-vocab-size long-lora-scaling-factors fully-sharded-loras? default-mm-loras "
        "enable-mixed-moe-lora-format? enable-moe-shared-loras? enable-tower-connector-lora? specialize-active-lora? "
        "enable-prompt-adapter? prompt-adapters max-prompt-adapters max-prompt-adapter-token=0 "
        "qlora-adapter-name-or-path",
    ),
    (
        "octavo serves text only so far",
        "limit-mm-per-prompt={} mm-processor-kwargs={} mm-processor-cache-gb mm-processor-cache-type "
        "media-io-kwargs={} mm-shm-cache-max-object-size-mb mm-encoder-attn-backend mm-encoder-attn-dtype "
        "mm-encoder-fp8-scale-path "
        "mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only? mm-encoder-tp-mode "
        "mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-tensor-ipc enable-mm-embeds? interleave-mm-strings? "
        "skip-mm-profiling?=true|false language-model-only?=true|false disable-chunked-mm-input?=true|false "
        "disable-mm-preprocessor-cache?=true|false enable-multimodal-encoder-data-parallel? video-pruning-method "
        "video-pruning-rate allowed-local-media-path allowed-media-domains enable-prompt-embeds? diffusion-config "
        "ec-transfer-config",
    ),
    (
        "octavo has no speculative decoding yet; leave it out: the text is the same without",
        "-sc/speculative-config spec-method spec-model spec-tokens speculative-model speculative-model-quantization "
        "num-speculative-tokens speculative-draft-tensor-parallel-size speculative-disable-mqa-scorer? "
        "speculative-max-model-len speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min "
        "spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold "
        "typical-acceptance-sampler-posterior-alpha disable-logprobs-during-spec-decoding? num-lookahead-slots=0",
    ),
    (
        "octavo has no structured outputs yet; say in the prompt what the answer must look like",
        "structured-outputs-config={} guided-decoding-backend=auto guided-decoding-disable-fallback? "
        "guided-decoding-disable-any-whitespace? guided-decoding-disable-additional-properties?",
    ),
    (
        "octavo does not parse tool calls yet; the answer's text holds them",
        "enable-auto-tool-choice? tool-call-parser tool-parser-plugin tool-server exclude-tools-when-tool-choice-none?",
    ),
    (
        "octavo has the formats of --reasoning-parser; write a parser as CONTRIBUTING.md shows",
        "reasoning-parser-plugin reasoning-config cohere-is-reasoning-model? cohere-format?",
    ),
    (
        "--reasoning-parser alone says it, and finds the format by itself",
        "enable-reasoning?=true",
    ),
    (
        "octavo generates text; it has no pooling models yet",
        "runner=auto|generate task=auto|generate convert=auto|none pooler-config override-pooler-config "
        "io-processor-plugin enable-flash-late-interaction?",
    ),
    (
        "--kv-cache-dtype holds for all layers, and its scales are of each token and head",
        "kv-cache-dtype-skip-layers calculate-kv-scales?",
    ),
    (
        "the KV cache stays in this process's memory",
        "kv-transfer-config kv-events-config "
        "kv-offloading-size kv-offloading-backend kv-sharing-fast-prefill? swap-space=0 kv-cache-metrics? "
        "kv-cache-metrics-sample preemption-mode=recompute",
    ),
    (
        "prefix-cache keys are always keyed blake2b hashes, block by block",
        "prefix-caching-hash-algo prefix-match-unit",
    ),
    (
        "weights are kept whole in memory; take a GGUF file of fewer bits if they do not fit",
        "cpu-offload-gb=0 cpu-offload-params offload-backend=auto offload-group-size=0 offload-num-in-group "
        "offload-params offload-prefetch-step enable-sleep-mode? weight-transfer-config enable-cumem-allocator?",
    ),
    (
        "nothing is compiled; kernel calls are recorded at start-up and replayed, unless --enforce-eager is given",
        "-O/optimization-level=0 -cc/compilation-config={} cudagraph-capture-sizes "
        "-cudagraph/cuda-graph-sizes max-cudagraph-capture-size max-seq-len-to-capture cudagraph-metrics? "
        "performance-mode=balanced jit-monitor-mode jit-monitor-verbose?",
    ),
    (
        "kernels are chosen once, at load, and the log says which",
        "attention-backend=auto -ac/attention-config={} additional-config={} override-attention-dtype "
        "linear-backend=auto kernel-config={} enable-flashinfer-autotune? gdn-prefill-backend kda-prefill-backend "
        "ir-op-priority "
        "disable-cascade-attn?=true|false use-fp64-gumbel? mamba-backend mamba-block-size mamba-cache-dtype=auto "
        "mamba-cache-mode mamba-ssm-cache-dtype=auto mamba-ssu-algorithm mamba-cache-philox-rounds "
        "enable-mamba-cache-stochastic-rounding? use-replayssm? replayssm-buffer-len",
    ),
    (
        "windows are kept as the model was made, and each kind of layer has its own part of the KV cache",
        "disable-sliding-window? disable-hybrid-kv-cache-manager?",
    ),
    (
        "prefill is always chunked by --max-num-batched-tokens",
        "enable-chunked-prefill?=true max-num-partial-prefills=1 max-long-partial-prefills=1 "
        "prefill-schedule-interval scheduler-delay-factor=0 num-scheduler-steps=1 "
        "multi-step-stream-outputs?=true|false disable-async-output-proc?=true|false use-v2-block-manager?=true "
        "max-num-scheduled-tokens scheduler-reserve-full-isl? watermark=0",
    ),
    (
        "octavo has one scheduler, one runner and one worker",
        "scheduler-cls worker-cls=auto worker-extension-cls model-impl=auto",
    ),
    (
        "octavo loads no code into the server but --logits-processors and --middleware",
        "logits-processor-pattern",
    ),
    (
        "octavo speaks HTTP/1.1 only",
        "grpc?",
    ),
    (
        "octavo serves /openapi.json and no pages of documentation",
        "disable-fastapi-docs?=true|false enable-offline-docs?",
    ),
    (
        "requests are logged only with --enable-log-requests, answers only with --enable-log-outputs too; see "
        "--log-format for the form",
        "disable-log-requests?=true|false enable-log-deltas?=true|false log-error-stack? log-config-file",
    ),
    (
        "see --step-trace for what a step did, and /metrics",
        "collect-detailed-traces show-hidden-metrics-for-version profiler-config "
        "enable-layerwise-nvtx-tracing? enable-logging-iteration-details? enable-mfu-metrics? "
        "enable-per-request-metrics? enable-server-load-tracking?",
    ),
    (
        "answers always say it",
        "enable-prompt-tokens-details?=true enable-request-id-headers?=true",
    ),
    (
        "say it in the request",
        "enable-force-include-usage? return-tokens-as-token-ids? default-chat-template-kwargs={} "
        "response-role=assistant tokens-only? stream-interval=1",
    ),
    (
        "messages are given to the template in the form that it is written for",
        "chat-template-content-format=auto",
    ),
    (
        "logprobs are those of the raw distribution",
        "logprobs-mode=raw_logprobs",
    ),
    (
        "octavo needs the tokenizer, and reads tokenizer.json, tokenizer.model or GGUF metadata",
        "skip-tokenizer-init? tokenizer-mode=auto|hf tokenizer-pool-size=0 tokenizer-pool-type "
        "tokenizer-pool-extra-config renderer-num-workers=1",
    ),
    (
        "use --hf-overrides JSON",
        "rope-scaling rope-theta hf-config-path config-format=auto|hf",
    ),
    (
        "set the environment variable HF_TOKEN",
        "hf-token",
    ),
    (
        "weights are mapped and read in the order of the file; there is nothing to set",
        "model-loader-extra-config={} ignore-patterns safetensors-load-strategy=lazy safetensors-prefetch-block-size "
        "safetensors-prefetch-num-threads pt-load-map-location=cpu use-tqdm-on-load?=true|false "
        "quantization-config allow-deprecated-quantization? quantization-param-path",
    ),
    (
        "start octavo under numactl or taskset: it keeps to the cores that it is given",
        "numa-bind? numa-bind-cpus numa-bind-nodes",
    ),
    (
        "set OCTAVO_ENABLE_MULTIPROCESSING=0",
        "disable-frontend-multiprocessing?",
    ),
    (
        "octavo does not have it",
        "fingerprint-mode fingerprint-value override-neuron-config",
    ),
]


@dataclass(frozen=True)
class AbsentFlag:
    """Attributes:

    keyword: the flag's name with underscores.
    short: another name, with its dash, or None.
    why: the reason, or what to use instead.
    is_switch: whether it is given without a value.
    neutral: values that ask for nothing, as JSON or text gives them.
    """

    keyword: str
    short: str | None
    why: str
    is_switch: bool
    neutral: tuple[Any, ...]

    @property
    def flag(self) -> str:
        return "--" + self.keyword.replace("_", "-")

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether ``value`` is taken: it changes nothing."""
        if isinstance(value, str):
            value = _plain(value)
        return value is None or any(value == known and type(value) is type(known) for known in self.neutral)

    def written(self, value: Any) -> str:
        """As on a command line."""
        if self.is_switch:
            return self.flag if value else self.flag.replace("--", "--no-", 1)
        return f"{self.flag} {value if isinstance(value, str) else json.dumps(value)}"

    def refusal(self) -> str:
        taken = [json.dumps(value).strip('"') for value in self.neutral if not self.is_switch]
        return f"{self.flag}: {self.why}" + (f" ({' or '.join(taken)} is taken)" if taken else "")


@cache
def absent_flags() -> dict[str, AbsentFlag]:
    """Keyword → flag."""
    found = {}
    for why, names in _TABLE:
        for written in names.split():
            name, _, values = written.partition("=")
            short, _, name = name.rpartition("/")
            is_switch = name.endswith("?")
            keyword = name.removesuffix("?").replace("-", "_")
            neutral = tuple(_plain(value) for value in values.split("|") if value)
            if is_switch and not neutral:
                neutral = (False,)
            found[keyword] = AbsentFlag(keyword, short or None, why, is_switch, neutral)
    return found


def _plain(text: str) -> Any:
    """What the text says as JSON, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
