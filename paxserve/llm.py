"""`LLM`: text from a model in one call, named and shaped as vLLM users know it."""

import itertools
import sys
from collections.abc import Generator, Mapping, Sequence
from numbers import Integral
from typing import Any

from paxserve.config import EngineConfig
from paxserve.engine import Engine, Prompt
from paxserve.lockstep import follow
from paxserve.outputs import RequestOutput
from paxserve.progress import Display
from paxserve.sampling_params import SamplingParams
from paxserve.tokenizers import ChatTemplate

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded and compiled, that generates for lists of prompts with continuous batching.

    Options are those of `EngineConfig`, by keyword. `progress` shows bars on the terminal while loading and compiling.
    On several hosts the same script is started on all of them: what follows `LLM(...)` is run by process 0 only, and in the
    others `LLM(...)` does what that one does and exits when it has ended.

    >>> llm = LLM("smollm2")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str, *, progress: bool = False, **options: Any) -> None:
        config = EngineConfig(model=str(model), **options)
        with Display(enabled=progress) as display:
            self.engine = Engine(config, display.update)
        if self.engine.follows:
            follow(self.engine)
            sys.exit()
        self._ids = itertools.count()
        # By request id: what waits for the iterator that asked for it. All requests of an iterator share one inbox.
        self._inboxes: dict[str, dict[str, RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run all prompts to their ends; outputs come in the order of the prompts.

        prompts: a string, {"prompt_token_ids": [...]}, or a list of either; a list of ints is one prompt.
        params: one for all, or one per prompt; the defaults of `SamplingParams` if None.
        priority: one per prompt, lower goes first.
        use_tqdm: show a progress bar.
        Raises ValueError, before anything runs, if any prompt or its parameters are refused.
        """
        finished = {}
        with Display(enabled=use_tqdm) as display:
            total = len(_prompt_list(prompts))
            display.update("generating", 0, total)
            for output in self.stream(prompts, params, priority=priority):
                if output.finished:
                    finished[int(output.request_id)] = output
                    display.update("generating", len(finished), total)
        return [finished[number] for number in sorted(finished)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """The same, giving each request's output whenever it grew. Its `outputs` are the same objects each time, with more in
        them.

        Leaving the iterator early aborts what is unfinished.
        """
        ids = self._submit(_prompt_list(prompts), params, priority)
        outputs = self._run(ids)
        next(outputs)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them, of {"role": ..., "content": ...} messages.

        chat_template: Jinja source; by default the model's own. Raises ValueError if there is none.
        """
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            {"prompt_token_ids": self.chat_token_ids(conversation, chat_template, add_generation_prompt)}
            for conversation in conversations
        ]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def chat_token_ids(
        self, messages: Messages, chat_template: str | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """A conversation as the token ids that the model is given."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError(f"model {self.engine.source.name} has no tokenizer, which chat needs")
        template = ChatTemplate.of(tokenizer, chat_template)
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        return tokenizer.encode(text, add_special_tokens=False)

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> set[str]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        priority = [0] * len(prompts) if priority is None else priority
        for name, values in (("params", params), ("priority", priority)):
            if len(values) != len(prompts):
                raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts: give one for all or one each")
        ids: set[str] = set()
        try:
            for prompt, prompt_params, prompt_priority in zip(prompts, params, priority, strict=True):
                request_id = str(next(self._ids))
                self.engine.add_request(request_id, prompt, prompt_params, prompt_priority)
                ids.add(request_id)
        except Exception:
            self._abort(ids)
            raise
        return ids

    def _run(self, ids: set[str]) -> Generator[RequestOutput, None, None]:
        inbox: dict[str, RequestOutput] = {}
        self._inboxes.update(dict.fromkeys(ids, inbox))
        unfinished = set(ids)
        try:
            yield None  # type: ignore[misc]  # to `stream`: from here on, whatever happens, nothing is left running
            while unfinished:
                if not inbox:
                    self._step()
                for request_id in list(inbox):
                    output = inbox.pop(request_id)
                    if output.finished:
                        unfinished.remove(request_id)
                    yield output
        finally:
            ended = {request_id for request_id, output in inbox.items() if output.finished}
            self._abort(unfinished - ended)
            for request_id in ids:
                del self._inboxes[request_id]

    def _step(self) -> None:
        """One step for all iterators: each output goes to the one that will give it out."""
        for output in self.engine.step():
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox[output.request_id] = output

    def _abort(self, ids: set[str]) -> None:
        for request_id in ids:
            self.engine.abort_request(request_id)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
