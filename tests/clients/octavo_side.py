"""What the tests of clients need of octavo itself, run by octavo's own Python: ``octavo_side.py COMMAND …``.

``tokenizer FOLDER`` writes the demo model's tokenizer in the form that clients read. ``logprobs`` takes JSON on
standard input, a list of [context ids, continuation ids], and prints the continuations' log-likelihoods from ``LLM``.
"""

import json
import sys
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.checkpoints import resolve_model
from octavo.tokenizers import load_tokenizer

MODEL = "smollm2"


def write_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(MODEL))
    # The library's own form of it; the door has no use for that, so it is not public.
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | tokenizer.named_tokens))


def print_logprobs() -> None:
    pairs: list[list[list[int]]] = json.load(sys.stdin)
    llm = LLM(MODEL)
    prompts = [{"prompt_token_ids": context + continuation} for context, continuation in pairs]
    sums = []
    for (context, continuation), output in zip(
        pairs, llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False), strict=True
    ):
        tables = (output.prompt_logprobs or [])[len(context) :]
        found = [(table or {})[token_id].logprob for table, token_id in zip(tables, continuation, strict=True)]
        sums.append(sum(found))
    json.dump(sums, sys.stdout)


if __name__ == "__main__":
    if sys.argv[1] == "tokenizer":
        write_tokenizer(Path(sys.argv[2]))
    else:
        print_logprobs()
