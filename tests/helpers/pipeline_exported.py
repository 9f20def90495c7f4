"""A language model in the manner of well-known libraries, which torch.fx cannot follow; run on the ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch

import unidist.torch as ud
from unidist.settings.environment import set_variables
from unidist_pipeline.strategy import Pipeline

WIDTH, CODES, TIME = 8, 11, 6


class Answer(dict[str, Any]):
    """What the model returns: a dict that has attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Attention(torch.nn.Module):
    """Heads, and a mask that may be missing."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.all, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> tuple[Any, ...]:
        """Return the hidden states, and the weights if they are asked for."""
        batch, time, _ = hidden.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.all(hidden).split(WIDTH, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / (WIDTH // self.heads) ** 0.5
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1)
        made = self.out((weights @ value).transpose(1, 2).reshape(batch, time, WIDTH))
        return (made, weights) if options.get("output_attentions") else (made,)


class Layer(torch.nn.Module):
    """A block, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(2)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> tuple[Any, ...]:
        """Return a tuple, the new hidden states first."""
        hidden = hidden + self.attention(hidden, mask, **options)[0]
        normal = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if isinstance(normal, torch.Tensor) and normal.shape[1] > 1:
            hidden = hidden + self.dropout(self.narrow(torch.nn.functional.gelu(self.wide(normal))))
        return (hidden,)


class Body(torch.nn.Module):
    """Embeddings and blocks; sizes and arguments decide what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CODES, WIDTH)
        self.positions = torch.nn.Embedding(TIME, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("used", torch.zeros((), dtype=torch.int64))
        self.scales = [1.0, 0.5]

    def forward(self, input_ids: torch.Tensor, *more: torch.Tensor, attention_mask: Any = None, **options: Any) -> Any:
        """Return an answer."""
        batch, time = input_ids.size()
        if time > TIME:
            raise ValueError(f"{time} is too long")
        self.used += 1
        hidden = self.embed(input_ids) + self.positions(torch.arange(time, device=input_ids.device))[None]
        for each in more:
            hidden = hidden + each
        mask = None
        if attention_mask is not None:
            mask = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * -1e4
        states = []
        with torch.no_grad():
            first = hidden.mean(dim=-1, keepdim=True)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden * self.scales[number % 2], mask, **options)[0]
            if options.get("output_hidden_states"):
                states.append(hidden)
        return Answer(last=hidden - first, states=tuple(states), batch=batch)


class Language(torch.nn.Module):
    """The body, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = torch.nn.Linear(WIDTH, CODES, bias=False)
        self.head.weight = self.body.embed.weight
        self.double()

    def forward(self, input_ids: torch.Tensor, *more: torch.Tensor, mode: str = "logits", **options: Any) -> Any:
        """Return an answer with logits."""
        made = self.body(input_ids, *more, **options)
        return Answer(logits=self.head(made.last), states=made.states, mode=mode, count=made["batch"] * 0 + 3)


def language() -> Language:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return Language()


def batch(seed: int, samples: int = 10, time: int = TIME) -> tuple[dict[str, Any], torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, CODES, (samples, time + 1), generator=generator)
    mask = (torch.rand((samples, time), generator=generator) > 0.2).long()
    return {"input_ids": codes[:, :-1], "attention_mask": mask, "output_attentions": False}, codes[:, 1:]


def loss_of(answer: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    return torch.nn.functional.cross_entropy(answer["logits"].flatten(0, 1), targets.flatten())


def training(strategy: Pipeline) -> tuple[float, set[str]]:
    """Train beside one process that runs the same micro-batches; returns the largest difference, and what is held."""
    torch.manual_seed(0)
    plain, model = language(), language()
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    errors = []
    with set_variables({"UNIDIST_ENGINE": "shm", "UNIDIST_STRATEGY": ""}):
        ud.init()
        try:
            step = ud.TrainStep(
                model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_of, strategy=strategy
            )
            for number in range(3):
                inputs, targets = batch(number)
                total = 0.0
                for piece in (slice(0, 4), slice(4, 7), slice(7, 10)):
                    part = {key: value[piece] if torch.is_tensor(value) else value for key, value in inputs.items()}
                    loss = loss_of(plain(**part), targets[piece]) * len(targets[piece]) / len(targets)
                    loss.backward()
                    total += float(loss.detach())
                other.step()
                other.zero_grad()
                errors.append(abs(float(step(inputs, targets)) - total))
            plain.eval()
            inputs, targets = batch(9, samples=7, time=4)  # of another length
            with torch.no_grad():
                expected = plain(**inputs)
            predicted = step.predict(inputs)
            errors.append(float((predicted["logits"] - expected.logits).abs().max()))
            errors.append(abs(float(step.evaluate(inputs, targets)) - float(loss_of(expected, targets))))
            assert (type(predicted), predicted["mode"], predicted["count"]) == (Answer, "logits", 3)
            state, wanted = step.model.state_dict(), plain.state_dict()
            errors += [
                float((value - wanted[name]).abs().max()) for name, value in state.items() if name != "body.used"
            ]
        finally:
            ud.shutdown()
    return max(errors), set(state)


class Rounding(torch.autograd.Function):
    """Has a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Small(torch.nn.Module):
    """Does what torch.fx cannot follow, and something else."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.act = act

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        hidden = self.first(hidden) if hidden.shape[0] > 1 else hidden
        return self.second(self.act(self, hidden))


def refused() -> dict[str, str]:
    """Ask for what cannot be; returns the errors."""

    def adds(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        model.seen += hidden.detach().mean(dim=0)
        return hidden

    def assigns(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        model.seen = model.seen + 1
        return hidden * model.seen

    class Shared(Small):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return adds(self, super().forward(adds(self, hidden)))

    hooked = Small(lambda model, hidden: hidden)
    hooked.second.register_forward_hook(lambda module, args, output: None)
    example = torch.ones(4, WIDTH)
    asked: dict[str, tuple[torch.nn.Module, Any]] = {
        "values": (Small(lambda model, hidden: hidden if hidden.sum() > 0 else -hidden), example),
        "function": (Small(lambda model, hidden: Rounding.apply(hidden)), example),
        "hooks": (hooked, example),
        "buffer": (Shared(lambda model, hidden: hidden), example),
        "assigned": (Small(assigns), example),
        "no example": (Small(lambda model, hidden: hidden), None),
    }
    found = {}
    with set_variables({"UNIDIST_ENGINE": "shm", "UNIDIST_STRATEGY": ""}):
        ud.init()
        try:
            for name, (model, inputs) in asked.items():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                strategy = Pipeline(2, split="second", example=inputs)
                try:
                    ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss, strategy=strategy)
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"
        finally:
            ud.shutdown()
    return found
