"""Use an engine as a LangChain LLM.

pip install langchain-core
python examples/langchain_llm.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

try:
    from langchain_core.language_models.llms import LLM
    from langchain_core.outputs import GenerationChunk
    from langchain_core.prompts import PromptTemplate
except ImportError:
    sys.exit("this example needs LangChain's core: pip install langchain-core")

from selfspec import Engine


class SelfspecLLM(LLM):
    """Answers each prompt as a chat of one message, with one engine that all calls and threads share."""

    engine: Any
    options: dict[str, Any] = {}  # keyword arguments of `Engine.complete`

    @property
    def _llm_type(self) -> str:
        return "selfspec"

    def _call(self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any) -> str:
        return self.engine.complete(self._chat(prompt), **self._options(stop, kwargs)).text

    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        with self.engine.stream(self._chat(prompt), **self._options(stop, kwargs)) as pieces:
            for piece in pieces:
                yield GenerationChunk(text=piece)

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**self.options, **({"stop_strings": stop} if stop else {}), **kwargs}

    @staticmethod
    def _chat(prompt: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="folder, GGUF file or hub name")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    engine = Engine.from_pretrained(args.model)
    llm = SelfspecLLM(engine=engine, options={"max_new_tokens": args.max_new_tokens, "do_sample": False})
    chain = PromptTemplate.from_template("Name the capital of {country}.") | llm

    print(chain.invoke({"country": "France"}))
    print(chain.batch([{"country": "Japan"}, {"country": "Peru"}]))  # two threads, one batch of the engine
    for piece in chain.stream({"country": "Kenya"}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
