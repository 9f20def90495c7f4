"""The model of one rank of a pipeline: its stages only, with the interface of the whole model.

A rank that waits to join an elastic job has one without stages, which gets them when the rank joins.

`fit`, `evaluate`, `predict` and `train_on_batch` run the pipeline: every rank calls them with the same arguments, and
the same data along the pipeline, and gets the same results. They run eagerly between the stages, whatever `compile` was
told; the stages themselves are compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from unidist.errors import UsageError
from unidist_pipeline._keras.module import StageModule

if TYPE_CHECKING:
    from unidist_pipeline._keras.fit import PipelineFit


class PipelineModel(keras.Model):  # type: ignore[misc]  # keras has no types
    """This rank's stages of a model.

    Its weights are those of the stages: the same objects with the same paths as in the whole model.

    Args:
        whole: the model.
        overridden: methods that the script's model overrides, which a pipeline cannot run.
        compiled_with: arguments of the whole model's `compile`, without the optimizer; empty if it was not compiled.

    Attributes:
        stages: this rank's.
        takes_training: `fit` tells the model's call that it is training.
        overridden: see above.
        compiled_with: see above.
    """

    overridden: Sequence[str]
    compiled_with: Mapping[str, Any]

    def __init__(self, whole: Any, *, overridden: Sequence[str], compiled_with: Mapping[str, Any]) -> None:
        super().__init__(name=whole.name, dtype=whole.dtype_policy)
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.stages: list[StageModule] = []
        self._shapes = (getattr(whole, "input_shape", None), getattr(whole, "output_shape", None))
        if hasattr(whole, "output_names"):  # by which losses and metrics may be given
            self.output_names = list(whole.output_names)
        # Past Keras, which would track what is in them.
        self.__dict__.update(overridden=tuple(overridden), compiled_with=dict(compiled_with))
        self.takes_training = bool(whole._call_has_training_arg)
        self._pipeline_fit: PipelineFit | None = None
        self.built = True

    def hold(self, modules: Sequence[StageModule]) -> None:
        """Take this rank's stages, once."""
        self.stages = list(modules)

    @property
    def input_shape(self) -> Any:
        """The whole model's; None if it has none."""
        return self._shapes[0]

    @property
    def output_shape(self) -> Any:
        """The whole model's; None if it has none."""
        return self._shapes[1]

    def fit_by(self, fit: PipelineFit) -> None:
        """Let `fit` and the other loops use this."""
        self.__dict__["_pipeline_fit"] = fit  # past Keras, which would look for layers in it

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, **options: Any) -> None:
        """Configure training, see Keras; steps run eagerly, since they wait for other ranks between the stages."""
        if options.pop("jit_compile", False) is True:
            raise UsageError(
                "model.compile(jit_compile=True): what XLA compiles cannot wait for other ranks. Leave jit_compile out"
            )
        options["run_eagerly"] = True
        super().compile(optimizer, loss, jit_compile=False, **options)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the outputs, as in inference. Collective over the pipeline.

        Raises:
            UsageError: in training or in a graph, where the other ranks' stages cannot be recorded.
        """
        if training or not tf.executing_eagerly():
            raise UsageError(
                "a model that is a pipeline cannot be called in training or inside of a tf.function: its other stages "
                "are on other ranks. Use step = TrainStep(model, optimizer, loss_fn), or model.fit"
            )
        return self._fit("model(x)").predict(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        """See Keras. Collective over all ranks."""
        return self._fit("fit").train(*keras.utils.unpack_x_y_sample_weight(data))

    def test_step(self, data: Any) -> dict[str, Any]:
        """See Keras. Collective over the pipeline."""
        return self._fit("evaluate").test(*keras.utils.unpack_x_y_sample_weight(data))

    def predict_step(self, data: Any) -> Any:
        """See Keras. Collective over the pipeline."""
        return self._fit("predict").predict(keras.utils.unpack_x_y_sample_weight(data)[0])

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the metrics as of the last step, which all ranks of the pipeline have."""
        return {} if self._pipeline_fit is None else dict(self._pipeline_fit.results)

    def own_metrics_result(self) -> dict[str, Any]:
        """Return the metrics of this rank's objects, in Keras' order; they are valid on the rank of the last stage."""
        found: dict[str, Any] = super().get_metrics_result()
        ordered = super()._flatten_metrics_in_order({name: name for name in found})
        return {name: found[name] for name in ([ordered] if isinstance(ordered, str) else ordered)}

    def _fit(self, caller: str) -> PipelineFit:
        if self._pipeline_fit is None:
            raise UsageError(
                f"{caller} of a pipeline needs the model that distribute(model, optimizer) returned; with TrainStep, "
                "use the step's run, evaluate and predict"
            )
        return self._pipeline_fit

    # What Keras does with a whole model only

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: everything is built, and metrics are on the rank that has the outputs."""

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        """Return the results in the order of the metrics, which Keras knows only on the rank of the last stage."""
        values = [logs[name] for name in self.get_metrics_result() if name in logs]
        return values[0] if len(values) == 1 else values

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this rank has only some of the layers."""
        self._refuse("save")

    def save_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this rank has only some of the weights."""
        self._refuse("save_weights")

    def load_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this rank has only some of the weights."""
        self._refuse("load_weights")

    def _refuse(self, method: str) -> NoReturn:
        raise UsageError(
            f"model.{method} sees this rank's stages of a pipeline only. Use unidist's save(path, model, optimizer) "
            "and load, whose checkpoints hold the whole model and load at any number of ranks"
        )
