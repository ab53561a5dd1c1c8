"""octavo, in the process that asks (``LLM``), with its default settings but for the prefix cache."""

import octavo
from benchmarks.peers import work
from octavo import LLM, SamplingParams


def main() -> None:
    args = work.options()
    llm = LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=work.MAX_MODEL_LEN,
        max_num_seqs=work.MAX_STREAMS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    with llm:
        work.measure(args, octavo.__version__, "bf16", generate)


if __name__ == "__main__":
    main()
