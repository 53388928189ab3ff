"""Prompts from files or reasoning-gym, tokenised, and the order in which they are visited.

Every row is checked and tokenised at load, so that a run never meets a broken or over-long prompt
later.
Torch-free; knows nothing of rows, ranks or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.schema import DataConfig
from rlhpc.data.readers import (
    MISSING,
    Problems,
    RawRow,
    descend,
    prompt_files,
    read_rows,
    type_name,
)
from rlhpc.data.tokenizer import encode_text
from rlhpc.errors import ConfigError

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to be sampled from and scored."""

    index: int
    """Position in its dataset."""
    token_ids: tuple[int, ...]
    data_source: str
    """What the reward function and the metrics call the data; the file's name where no column says
    it."""
    ground_truth: Any
    """Handed to the reward function; a string, number, list or dict."""
    extra_info: dict[str, Any]
    text: str
    """What was tokenised, after the chat template."""
    messages: tuple[Message, ...] | None = None
    """The conversation before the chat template; None for a plain string."""
    response: str | None = None
    """Target text of supervised stages."""


class PromptDataset(Sequence[Prompt]):
    """Prompts of one split, in file order; the order of visits is `rows.PromptOrder`."""

    def __init__(self, prompts: Sequence[Prompt], *, num_overlong: int = 0) -> None:
        self._prompts = list(prompts)
        self.num_overlong = num_overlong
        """Prompts that were dropped for their length."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]


def load_prompts(
    config: DataConfig, tokenizer: Any, *, split: str, seed: int, need_response: bool = False
) -> PromptDataset:
    """The prompts of ``split``, checked, rendered and tokenised.

    Args:
        config: `RunConfig.data`.
        tokenizer: from `load_tokenizer`.
        split: `train` or `val`; the latter may be empty.
        seed: `RunConfig.seed`, for reasoning-gym, with different problems for each split.
        need_response: supervised stages: every row must carry `data.response_key`.

    Raises:
        ConfigError: a file cannot be read, rows are broken (all are named) or too long.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r}; expected train or val")
    problems = Problems()
    rows = list(read_rows(config, split=split, seed=seed, problems=problems))
    drafts = [d for r in rows if (d := _draft(r, config, problems, need_response)) is not None]
    _render(drafts, config, tokenizer, problems)
    problems.raise_all()
    _check_responses(drafts, config, tokenizer)
    kept = _within_limit(drafts, config)
    if split == "val":
        kept = kept[: config.val_max_prompts]
    elif not kept:
        raise ConfigError(
            f"data.train_files: {prompt_files(config, split)} gave no prompt that can be used "
            f"({len(drafts)} read); expected at least one. Set data.train_files to a file with "
            "prompts."
        )
    prompts = [
        Prompt(
            i,
            d.token_ids,
            d.source,
            d.truth,
            d.extra,
            d.text,
            tuple(d.messages) or None,
            d.response,
        )
        for i, d in enumerate(kept)
    ]
    return PromptDataset(
        prompts,
        num_overlong=sum(d.over for d in drafts),
    )


@dataclass
class _Draft:
    """A row on its way to a `Prompt`."""

    raw: RawRow
    messages: list[Message]
    text: str
    source: str
    truth: Any
    extra: dict[str, Any]
    response: str | None
    token_ids: tuple[int, ...] = ()
    over: bool = False


def _draft(
    row: RawRow, config: DataConfig, problems: Problems, need_response: bool
) -> _Draft | None:
    """The row's fields with their types checked; None (and noted) when any is wrong."""
    wrong: list[str] = []
    prompt = descend(row.values, config.prompt_key)
    messages, text = _check_prompt(prompt, config, wrong)
    truth = descend(row.values, config.answer_key)
    if truth is MISSING and not row.file.endswith(".parquet"):
        truth = descend(row.values, "answer")
    response = row.values.get(config.response_key)
    if response is not None and not isinstance(response, str):
        wrong.append(f"{config.response_key!r} is of type {type_name(response)}; expected a string")
    if need_response and response is None:
        wrong.append(f"no {config.response_key!r} (data.response_key)")
    if truth is MISSING:
        if not need_response:
            wrong.append(f"no {config.answer_key!r} (data.answer_key)")
        truth = ""
    elif not isinstance(truth, str | int | float | list | dict):
        wrong.append(
            f"{config.answer_key!r} is of type {type_name(truth)}; expected a string or number"
        )
    source = row.values.get("data_source", Path(row.file).stem)
    if not isinstance(source, str):
        wrong.append(f"'data_source' is of type {type_name(source)}; expected a string")
    extra = row.values.get("extra_info") or {}
    if not isinstance(extra, dict):
        wrong.append(f"'extra_info' is of type {type_name(extra)}; expected an object")
    for what in wrong:
        problems.add(row.file, row.line, what)
    return None if wrong else _Draft(row, messages, text, source, truth, extra, response)


def _check_prompt(prompt: Any, config: DataConfig, wrong: list[str]) -> tuple[list[Message], str]:
    """(messages, "") of a conversation or of a string under the chat template, else ([], text)."""
    key = config.prompt_key
    if prompt is MISSING:
        wrong.append(f"no {key!r} (data.prompt_key)")
    elif isinstance(prompt, str):
        if not prompt:
            wrong.append(f"{key!r} is empty")
        return ([{"role": "user", "content": prompt}], "") if config.chat_template else ([], prompt)
    elif not isinstance(prompt, list):
        wrong.append(
            f"{key!r} is of type {type_name(prompt)}; expected a string or a list of messages"
        )
    elif not prompt:
        wrong.append(f"{key!r} is an empty list")
    elif not config.chat_template:
        wrong.append(f"{key!r} is a list of messages; expected a string (data.chat_template=false)")
    else:
        for message in prompt:
            if not isinstance(message, dict):
                wrong.append(
                    f"{key!r} holds an item of type {type_name(message)}; expected messages"
                )
            elif bad := [k for k in ("role", "content") if not isinstance(message.get(k), str)]:
                kind = type_name(message.get(bad[0]))
                wrong.append(
                    f"{key!r} has a message whose {bad[0]} is of type {kind}; expected a string"
                )
        return prompt, ""
    return [], ""


def _render(drafts: list[_Draft], config: DataConfig, tokenizer: Any, problems: Problems) -> None:
    """Fill `text` and `token_ids`."""
    import jinja2

    if config.chat_template and drafts and not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template: true, but the tokenizer has no chat template; expected one in "
            "model.tokenizer_path. Set data.chat_template=false to feed string prompts as they are."
        )
    for draft in drafts:
        if draft.messages:
            try:
                draft.text = tokenizer.apply_chat_template(
                    draft.messages, tokenize=False, add_generation_prompt=True
                )
            except (jinja2.TemplateError, TypeError) as error:
                problems.add(
                    draft.raw.file, draft.raw.line, f"the chat template refuses it ({error})"
                )
    encoded = encode_text([d.text for d in drafts], tokenizer)
    for draft, ids in zip(drafts, encoded, strict=True):
        draft.token_ids = ids


def _within_limit(drafts: list[_Draft], config: DataConfig) -> list[_Draft]:
    """Drafts within `max_prompt_length`; an error names the others unless they may be dropped."""
    for draft in drafts:
        draft.over = len(draft.token_ids) > config.max_prompt_length
    over = [d for d in drafts if d.over]
    if over and not config.filter_overlong_prompts:
        raise ConfigError(
            f"data.max_prompt_length: {len(over)} of {len(drafts)} prompts are longer; expected "
            "at most "
            f"{config.max_prompt_length} tokens. Raise data.max_prompt_length or set "
            "data.filter_overlong_prompts=true to drop them:\n"
            + _listed(over, [d.token_ids for d in over])
        )
    return [d for d in drafts if not d.over]


def _check_responses(drafts: list[_Draft], config: DataConfig, tokenizer: Any) -> None:
    """Raise ConfigError when a target text with its EOS is over `max_response_length`."""
    with_response = [d for d in drafts if d.response is not None]
    texts = [d.response or "" for d in with_response]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    pairs = zip(with_response, encoded, strict=True)
    over = [(d, ids) for d, ids in pairs if len(ids) >= config.max_response_length]
    if over:
        raise ConfigError(
            f"data.max_response_length: {len(over)} target responses are longer with their EOS; "
            "expected at "
            f"most {config.max_response_length} tokens. Raise data.max_response_length or "
            "shorten them:\n" + _listed([d for d, _ in over], [(*ids, 0) for _, ids in over])
        )


def _listed(drafts: list[_Draft], ids: Sequence[Sequence[int]], most: int = 10) -> str:
    lines = [
        f"  {d.raw.file}:{d.raw.line}: {len(i)} tokens"
        for d, i in zip(drafts[:most], ids, strict=False)
    ]
    return "\n".join(lines + [f"  and {len(drafts) - most} more"] * (len(drafts) > most))


def make_sft_row(
    prompt: Sequence[int], response_text: str, tokenizer: Any
) -> tuple[list[int], list[bool]]:
    """(token_ids, loss_mask) of a supervised row; the mask is True on response and EOS.

    Args:
        prompt: token ids of the prompt.
        response_text: target text, without EOS.
        tokenizer: from `load_tokenizer`; must have an EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model.tokenizer_path: the tokenizer has no EOS token; expected one to end "
            "supervised responses. "
            "Set eos_token in tokenizer_config.json."
        )
    response = [
        *tokenizer(response_text, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    return [*prompt, *response], [False] * len(prompt) + [True] * len(response)
