"""A session: keys and values that stay in the cache between requests.

The session owns its blocks from its first request until it is closed. Where its memory is shorter
than the whole session, attention covers the last memory_len tokens, as in FasterTransformer's
circular cache. The tokens stay in order here: the window slides through blocks for twice as many,
and those that it does not cover any more come last when it reaches the end, once in memory_len
tokens. So a window is a row like any other to the kernels, and distances (ALiBi) need no care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher_scripts.common.errors import Problems
from launcher_scripts.contract.requests import TASK_FIELDS, GenerateRequest
from launcher_scripts.engine.messages.plan import Move
from launcher_scripts.engine.model.kv_cache import Block
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

WITH_TABLES = (GPTConfig, T5Config, BartConfig)  # of positions, where these are learned


@dataclass(eq=False)
class Session:
    """One session; changed by the engine's thread while a request of it runs, else by nobody.

    session_len: most tokens of all its requests and answers
    memory_len:  how many of the last tokens attention covers
    blocks:      of its tokens; None before there was room
    cached:      tokens in the blocks before the request that runs
    dropped:     tokens that have left the blocks
    pending:     the last token chosen, which is not in the cache yet
    said:        what the last request generated; None: nothing of it was kept
    ended:       the end token, after an answer that it ended: the session goes on without it
    snapshot:    where states that are not of tokens are kept meanwhile, if the model has such
    ia3_task, lora_adapter: of the last request: what is in the cache was computed with them
    """

    session_len: int
    memory_len: int
    blocks: list[Block] | None = None
    cached: int = 0
    dropped: int = 0
    pending: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    history: tuple[int, ...] | None = None
    ia3_task: int | None = None
    lora_adapter: int | None = None
    busy: bool = False
    closed: bool = False
    snapshot: int | None = None

    @property
    def window(self) -> int:
        """Number of tokens that attention covers; 0: all."""
        return self.memory_len if self.memory_len < self.session_len else 0

    def max_blocks(self, size: int) -> int:
        """Return the number of blocks of `size` tokens that the session has. Where it slides, all
        but a block of what was before the window makes room.
        """
        if self.session_len <= 2 * self.memory_len:
            return -(-self.session_len // size)
        return -(-(2 * self.memory_len + size - 2) // size)

    @property
    def positions(self) -> int:
        """Tokens of the session in or once in the cache."""
        return self.dropped + self.cached

    def begin_turn(self, request: GenerateRequest) -> None:
        """A request has been accepted."""
        self.busy = True
        self.ia3_task, self.lora_adapter = request.ia3_task, request.lora_adapter

    def make_room(self, used: int, tokens: int, slot: int, size: int) -> Move | None:
        """Have blocks of `size` tokens that the window has left come last, if `tokens` more do not
        fit behind the `used` ones."""
        if self.blocks is None or used + tokens <= size * len(self.blocks):
            return None
        count = (used - min(used, self.memory_len - 1)) // size
        self.blocks[:] = self.blocks[count:] + self.blocks[:count]
        self.cached -= count * size
        self.dropped += count * size
        return Move(slot, count * size)

    def enter_turn(self, prompt: int, tokens: Sequence[int], end_id: int) -> None:
        """A request has ended: its prompt and all but the last of its tokens are in the cache."""
        self.busy = False
        self.history = tuple(tokens)
        self.cached += prompt + max(len(tokens) - 1, 0)
        last = tuple(tokens[-1:])
        self.pending, self.finished = ((), last) if last == (end_id,) else (last, ())

    def abort_turn(self) -> None:
        """A request was cancelled before its first token: as if it had not come.

        Not if it has pushed the tokens before it out of the cache.
        """
        self.busy = False
        self.closed = self.closed or self.cached < 0


def learned_positions(config: ModelConfig) -> int | None:
    """Number of positions of a model with a table of them; None for one without."""
    learned = config.position_embedding == "learned"
    return config.max_positions if learned and isinstance(config, WITH_TABLES) else None


def check_session(
    problems: Problems,
    session: Session,
    request: GenerateRequest,
    prompt: int,
    config: ModelConfig,
    cache_tokens: int,
    block_tokens: int,
) -> None:
    """Check that the session and the model have room for a request with `prompt` tokens."""
    if not isinstance(config, GPTConfig):
        problems.add("only a decoder-only model has sessions")
    if session.closed:
        problems.add("the session has ended; begin a new one with START")
    if session.busy:
        problems.add("the session's request before this one has not ended")
    for name, field in TASK_FIELDS.items():
        requested, current = getattr(request, field), getattr(session, field)
        if session.positions and requested != current:
            problems.add(
                f"the session's keys and values were computed with another {name}; begin a new "
                "session with START",
                got="none" if requested is None else requested,
                choices=("none" if current is None else str(current),),
            )
    if request.soft_prompt:
        problems.add("Interactive Generations cannot work with prefix_soft_prompt !")
    if request.sampling.beam_width != 1:
        problems.add("a session has one beam", got=request.sampling.beam_width)
    if session.session_len < 1 or session.memory_len < 1:
        got = (session.session_len, session.memory_len)
        problems.add("session_len and memory_len must be at least 1", got=got)
        return
    needed = session.max_blocks(block_tokens) * block_tokens
    if needed > cache_tokens:
        problems.add(
            f"the session needs {needed} tokens in the key/value cache, which holds "
            f"{cache_tokens}; change session_len or memory_len"
        )
    total = session.positions + prompt + request.output_len
    positions = total - min(request.output_len, 1)  # the last token chosen is never fed back
    if prompt > session.memory_len:
        problems.add(
            f"Memory size too low ({session.memory_len}) vs. input length ({prompt}): memory_len"
        )
    if total > session.session_len:
        problems.add(
            f"Session size too low ({session.session_len}) vs. total output size ({total}): "
            "session_len"
        )
    max_positions = learned_positions(config)
    if max_positions is not None and positions > max_positions:
        problems.add(
            f"the session would need {positions} positions, and the model has {max_positions}"
        )
