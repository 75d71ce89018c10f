"""What a script for Horovod may call: the names, arguments and defaults of its modules."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from polyhvd.testing.stand_ins import is_installed

if not is_installed("tensorflow"):  # an import here would have others, which want stand-ins, find it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

EVERYWHERE = """
    init shutdown is_initialized start_timeline stop_timeline rank size local_rank local_size cross_rank
    cross_size is_homogeneous ProcessSet global_process_set add_process_set remove_process_set Average Sum
    Adasum Min Max Product Compression broadcast_object allgather_object join barrier gpu_available
    HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt InvalidArgumentError
    NotInitializedError PeerDepartedError PeerLostError RankMismatchError ShutdownError
    TransferTimeoutError UnsupportedError UnsupportedTypeError
"""
SIGNATURES = {
    "polyhvd.tensorflow": """
        allreduce(tensor, average=None, device_dense='', device_sparse='', compression=none, op=None,
            prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=world, ignore_name_scope=False)
        grouped_allreduce(tensors, average=None, device_dense='', device_sparse='', compression=none, op=None,
            prescale_factor=1.0, postscale_factor=1.0, process_set=world, ignore_name_scope=False, name=None)
        allgather(tensor, name=None, ignore_name_scope=False, process_set=world)
        grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=world)
        broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=world)
        broadcast_(variables, root_rank, name=None, process_set=world)
        alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=world)
        reducescatter(tensor, device_dense='', compression=none, op=Average, name=None, process_set=world,
            ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0)
        grouped_reducescatter(tensors, device_dense='', compression=none, op=Average, process_set=world,
            prescale_factor=1.0, postscale_factor=1.0)
        rank_op(name=None)
        local_rank_op(name=None)
        size_op(process_set_id=0, name=None)
        local_size_op(name=None)
        process_set_included_op(process_set_id=0, name=None)
        broadcast_variables(variables, root_rank, process_set=world, inplace=False)
        broadcast_object(obj=None, root_rank=0, session=None, name=None, process_set=world)
        broadcast_object_fn(root_rank=0, session=None, name=None, process_set=world)
        allgather_object(obj, session=None, name=None, process_set=world)
        broadcast_global_variables(root_rank)
        BroadcastGlobalVariablesHook(root_rank, device='')
        DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense='', device_sparse='',
            compression=none, sparse_as_dense=False, backward_passes_per_step=1, op=Average,
            gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None,
            process_set=world, scale_local_gradients=True)
        DistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=none,
            sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None,
            process_set=world, scale_local_gradients=True)
        PartialDistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=none,
            sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None,
            process_set=world, local_layers=None, scale_local_gradients=True)
        """,
    "polyhvd.tensorflow.keras": """
        DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=none,
            sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1,
            average_aggregated_gradients=False, num_groups=0, groups=None, process_set=world,
            scale_local_gradients=True)
        PartialDistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=none,
            sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, groups=None, process_set=world,
            local_layers=None, scale_local_gradients=True)
        allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None,
            compression=none)
        allgather(value, name=None)
        broadcast(value, root_rank, name=None)
        reducescatter(value, name=None, op=Average)
        broadcast_global_variables(root_rank)
        load_model(filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False)
        callbacks.BroadcastGlobalVariablesCallback(root_rank, device='', local_variables=None)
        callbacks.MetricAverageCallback(device='')
        callbacks.LearningRateScheduleCallback(initial_lr, multiplier, start_epoch=0, end_epoch=None,
            staircase=True, momentum_correction=True, steps_per_epoch=None)
        callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=5, momentum_correction=True,
            steps_per_epoch=None, verbose=0)
        callbacks.BestModelCheckpoint(monitor='val_loss', verbose=0, save_weights_only=False, mode='auto',
            save_freq='epoch')
        """,
}
# Where horovod.keras has another order, or less.
SIGNATURES["polyhvd.keras"] = (
    SIGNATURES["polyhvd.tensorflow.keras"]
    .replace(" save_weights_only=False,", "")
    .replace(
        """op=Average, backward_passes_per_step=1,
            average_aggregated_gradients=False, num_groups=0, groups=None, process_set=world,
            scale_local_gradients=True)""",
        "op=Average, num_groups=0, groups=None)",
    )
)

CASES = [
    (module, *match)
    for module, text in SIGNATURES.items()
    for match in re.findall(r"([\w.]+)\((.*?)\)\s*(?=[\w.]+\(|$)", " ".join(text.split()))
]


def attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize(("module", "name", "wanted"), CASES, ids=[f"{m}-{n}" for m, n, _ in CASES])
def test_arguments_are_those_of_horovod(module: str, name: str, wanted: str) -> None:
    """In its order; what comes after them is polyhvd's own."""
    imported = importlib.import_module(module)
    values = {"none": imported.Compression.none, "world": imported.global_process_set}
    values["Average"] = imported.Average
    found = list(inspect.signature(attribute(imported, name)).parameters.values())
    names = [part.partition("=") for part in wanted.split(", ")]
    assert [parameter.name for parameter in found][: len(names)] == [name for name, _, _ in names]
    for parameter, (_, equals, default) in zip(found, names, strict=False):
        expected = eval(default, values) if equals else inspect.Parameter.empty
        optional = not equals and parameter.default is None  # may be left out besides
        assert optional or parameter.default is expected or parameter.default == expected, parameter
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in found[len(names) :])


@pytest.mark.parametrize("module", SIGNATURES)
def test_every_module_has_the_common_names(module: str) -> None:
    imported = importlib.import_module(module)
    assert not [name for name in EVERYWHERE.split() if not hasattr(imported, name)]
    assert set(EVERYWHERE.split()) <= set(imported.__all__)
