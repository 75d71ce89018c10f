// The extension module polyhvd._core. See polyhvd/_core.pyi for what it offers.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/native_api.h"
#include "control/crc32c.h"
#include "engine/engine.h"
#include "host/kernels.h"
#include "mpi/runtime.h"
#include "observe/mailbox.h"
#include "observe/timeline_writer.h"
#include "python/caller.h"
#include "python/copies.h"
#include "python/dlpack.h"
#include "python/gil.h"
#include "python/mpi.h"
#include "python/settings.h"
#include "python/sketches.h"
#include "python/tensor.h"
#include "python/text.h"
#include "shm/segment.h"
#include "world.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

// Errors ----------------------------------------------------------------------

void raise_as_python(const Error& error) {
  const py::object type = py::module_::import("polyhvd.errors").attr(class_name(error.code));
  PyErr_SetObject(type.ptr(), readable(error.message).ptr());
}

// Exits ------------------------------------------------------------------------

// What Python does when a SystemExit is made, and what is called then; both are set once.
initproc make_system_exit = nullptr;
PyObject* on_system_exit = nullptr;

// As SystemExit.__init__(), which Python does not let a program replace.
int make_watched_exit(PyObject* self, PyObject* arguments, PyObject* keywords) {
  const int made = make_system_exit(self, arguments, keywords);
  const bool is_watched = PyInterpreterState_Get() == PyInterpreterState_Main() && !python_ends();
  if (made != 0 || !is_watched) return made;
  PyObject* code = reinterpret_cast<PySystemExitObject*>(self)->code;  // null without an argument
  if (code == nullptr) code = Py_None;
  if (PyObject* done = PyObject_CallFunctionObjArgs(on_system_exit, code, nullptr)) {
    Py_DECREF(done);
  } else {
    PyErr_WriteUnraisable(on_system_exit);
  }
  return 0;
}

void watch_system_exits(const py::function& watch) {
  if (make_system_exit != nullptr) return;
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(PyExc_SystemExit);
  on_system_exit = watch.inc_ref().ptr();
  make_system_exit = std::exchange(type->tp_init, &make_watched_exit);
}

// Handles ---------------------------------------------------------------------

class PyEngine;

struct PyHandle {
  PyHandle(std::shared_ptr<PyEngine> e, OperationPtr o, py::object k)
      : engine(std::move(e)), operation(std::move(o)), keep(std::move(k)) {}
  ~PyHandle();
  PyHandle(const PyHandle&) = delete;
  PyHandle& operator=(const PyHandle&) = delete;

  // Once a stream is held, what is given to it may use the result: there is nothing to wait for.
  bool done() const { return held ? operation->is_finished() : operation->is_over(); }
  void wait(std::optional<std::uintptr_t> stream);
  std::string name() const { return operation->submission.name; }

  std::shared_ptr<PyEngine> engine;
  OperationPtr operation;
  bool held = false;  // wait() has returned
  py::object keep;    // the tensors
  py::object result = py::none();
  py::object finish = py::none();
  py::object slot = py::none();
};

struct PyBuffer {
  std::shared_ptr<OwnedBuffer> buffer;
  DeviceEventPtr arrived;  // null on a CPU

  // `stream` is DLPack's: the consumer's, which goes on after what made the buffer; none is
  // CUDA's default stream, and -1 wants no order.
  py::capsule to_consumer(const py::object& stream) const {
    const std::intptr_t wanted = stream.is_none() ? 0 : stream.cast<std::intptr_t>();
    if (arrived && wanted != -1) arrived->hold(reinterpret_cast<Stream>(wanted));
    return to_dlpack(buffer);
  }
};

// The file of a timeline, between two engines.
struct PyTimelineFile {
  std::unique_ptr<TimelineWriter> writer;  // null: another engine has it, or it is closed

  void close() {
    const WithoutGil without_gil;
    writer.reset();
  }
};

// The engine ------------------------------------------------------------------

class PyEngine : public std::enable_shared_from_this<PyEngine> {
 public:
  PyEngine(const py::object& connected, const py::object& settings, const py::object& placement,
           const std::shared_ptr<Mailbox>& mailbox, const std::string& job,
           const py::object& nccl_libraries, std::shared_ptr<mpi::JobCommunicator> by_mpi) {
    Connections connections = read_connections(connected, settings);
    connections.nccl_libraries = paths_of(nccl_libraries);
    connections.mpi = std::move(by_mpi);
    EngineOptions options =
        read_options(settings, placement, job, mailbox, connections.watches_deaths);
    {
      // To make communicators takes all ranks, and some may still wait for this rank's
      // rendezvous, which is a thread of Python.
      const WithoutGil without_gil;
      engine_ = make_engine(std::move(connections), std::move(options));
    }
    native_.emplace(*engine_, placement.attr("generation").cast<std::uint64_t>());
    if (path_of(settings.attr("flight_folder")).empty()) return;
    const auto write = [engine = engine_.get()] { engine->flight().write("SIGUSR2"); };
    dump_signal_ = std::make_unique<DumpSignal>(write);
  }
  ~PyEngine() { shutdown(); }

  std::unique_ptr<PyHandle> submit(int kind, std::optional<std::string> name,
                                   const py::sequence& inputs, const py::object& outputs, int op,
                                   int root, double prescale, double postscale,
                                   ProcessSetId process_set, int priority, bool blocking,
                                   std::vector<std::int64_t> numbers, std::uint64_t generation) {
    native_->require_generation(generation, OpKind(kind), name ? name->c_str() : nullptr);
    release_orphans();
    Submission s;
    s.kind = static_cast<OpKind>(kind);
    name ? void(s.name = std::move(*name)) : leave_unnamed(s);
    s.op = static_cast<ReduceOp>(op);
    s.root = root;
    s.scale = {prescale, postscale};
    s.process_set = process_set;
    s.priority = priority;
    s.numbers = std::move(numbers);
    const std::size_t count = inputs.size();
    s.inputs.reserve(count);
    for (std::size_t i = 0; i < count; ++i) s.inputs.push_back(read_tensor(inputs[i], false));
    s.stream = stream_for(s, count > 0 ? inputs[0] : py::object());
    if (!outputs.is_none()) {
      const auto list = outputs.cast<py::sequence>();
      s.outputs.reserve(count);
      for (const py::handle output : list) s.outputs.push_back(read_tensor(output, true));
    }
    py::object keep = outputs.is_none() ? py::object(inputs) : py::make_tuple(inputs, outputs);
    OperationPtr operation = engine_->submit(std::move(s), blocking, caller_line);
    return std::make_unique<PyHandle>(shared_from_this(), std::move(operation), std::move(keep));
  }

  // One dense tensor in place.
  OperationPtr submit_in_place(Submission s, py::handle tensor, bool blocking) {
    release_orphans();
    s.inputs.push_back(read_tensor(tensor, true));
    s.outputs.push_back(s.inputs.back());
    s.stream = stream_for(s, tensor);
    return engine_->submit(std::move(s), blocking, caller_line);
  }

  std::unique_ptr<PyHandle> start(Submission s, py::handle tensor) {
    OperationPtr operation = submit_in_place(std::move(s), tensor, false);
    auto keep = py::reinterpret_borrow<py::object>(tensor);
    auto handle =
        std::make_unique<PyHandle>(shared_from_this(), std::move(operation), std::move(keep));
    handle->result = handle->keep;
    return handle;
  }

  // Submit and wait in one.
  void run(Submission s, py::handle tensor) {
    const OperationPtr operation = submit_in_place(std::move(s), tensor, true);
    try {
      wait(operation);
    } catch (...) {
      if (!operation->is_finished()) adopt(operation, py::reinterpret_borrow<py::object>(tensor));
      throw;
    }
  }

  // On a device `stream`, or else the one that was current at submit, goes on after it.
  void wait(const OperationPtr& operation, std::optional<Stream> stream = {}) {
    wait_for_end(operation);
    if (operation->arrived) operation->arrived->hold(stream.value_or(operation->submission.stream));
  }

  void wait_for_end(const OperationPtr& operation) {
    std::optional<py::error_already_set> raised;
    std::optional<Error> error;
    {
      const WithoutGil without_gil;
      const auto interrupted = [&raised] {
        if (python_ends()) return false;
        const WithGil with_gil;
        if (PyErr_CheckSignals() == 0) return false;
        raised.emplace();
        return true;
      };
      try {
        engine_->wait(operation, interrupted);
      } catch (const Failure& failure) {
        error = failure.error();
        EndOfProgram::hold_others();
      }
    }
    if (raised) throw std::move(*raised);
    if (error) throw Failure(std::move(*error));
  }

  // A handle was dropped before its operation was done: its tensors must live on.
  void adopt(OperationPtr operation, py::object keep) {
    orphans_.push_back({std::move(operation), std::move(keep)});
  }

  void shutdown(const std::string& words = {}) {
    {
      const WithoutGil without_gil;
      dump_signal_.reset();
      if (!abandoned_) engine_->shutdown(words);
    }
    if (!abandoned_) (void)std::exchange(orphans_, {});
  }

  void abort(const std::string& reason) {
    const WithoutGil without_gil;
    engine_->abort(reason);
  }

  void set_header(std::string json) {
    engine_->flight().set_header(json);
    header_ = std::move(json);
  }
  void start_timeline(const py::object& path, bool mark_cycles, std::uint64_t bytes_max) {
    TimelineOptions options{path_of(path), mark_cycles, bytes_max, header_};
    const WithoutGil without_gil;
    engine_->timeline().start(std::move(options));
  }
  bool stop_timeline() {
    const WithoutGil without_gil;
    return engine_->timeline().stop();
  }
  void add_data_wait(std::int64_t begin_ns, std::int64_t end_ns) {
    engine_->timeline().add_data_wait(begin_ns, end_ns);
  }
  std::unique_ptr<PyTimelineFile> hand_over_timeline() {
    const WithoutGil without_gil;
    std::unique_ptr<TimelineWriter> writer = engine_->timeline().hand_over();
    if (writer == nullptr) return nullptr;
    return std::make_unique<PyTimelineFile>(PyTimelineFile{std::move(writer)});
  }
  void take_over_timeline(PyTimelineFile& file) {
    if (file.writer == nullptr) return;
    const WithoutGil without_gil;
    engine_->timeline().take_over(std::move(file.writer), header_);
  }

  // In a forked child. The engine is leaked: its threads do not exist here.
  void abandon() {
    abandoned_ = true;
    DumpSignal::forget();
    (void)dump_signal_.release();
    engine_->abandon();
    (void)engine_.release();
  }

  std::map<std::string, std::uint64_t> counters() const { return engine_->counters(); }
  std::map<ProcessSetId, std::vector<int>> process_sets() const { return engine_->process_sets(); }
  Turn take_turn(int kind, ProcessSetId set) { return engine_->take_turn(set, OpKind(kind)); }
  void tune(const Tuning& tuning) { engine_->tune(tuning); }
  Tuning tuning() const { return engine_->tuning(); }
  void notify(std::uint32_t notice) { engine_->notify(notice); }
  std::uint32_t notice() const { return engine_->notice(); }
  void set_behind(bool behind) { engine_->set_behind(behind); }
  bool is_behind() const { return engine_->is_behind(); }
  bool has_lost_results() const { return engine_->has_lost_results(); }
  bool are_devices_done() const { return engine_->are_devices_done(); }
  double step_s() const { return engine_->step_s(); }
  std::pair<double, std::uint64_t> waits() const {
    const Engine::Waits waits = engine_->waits();
    return {waits.seconds, waits.agreed};
  }
  std::vector<int> dead_here() const { return engine_->dead_here(); }
  // For a native library that was built with `version` of c_api.h.
  std::uintptr_t native_api(std::uint32_t version) const {
    if (version == POLYHVD_C_API_VERSION)
      return reinterpret_cast<std::uintptr_t>(&native_->table());
    const py::object type =
        py::module_::import("polyhvd.errors").attr("HorovodVersionMismatchError");
    PyErr_Format(type.ptr(),
                 "the adapter's native library uses version %u of polyhvd's C interface, and the "
                 "core has version %u: they are from different installations; reinstall polyhvd",
                 version, static_cast<unsigned>(POLYHVD_C_API_VERSION));
    throw py::error_already_set();
  }
  std::uint64_t generation() const { return native_->generation(); }

 private:
  struct Orphan {
    OperationPtr operation;
    py::object keep;
  };

  void release_orphans() {
    if (orphans_.empty()) return;
    // Taken out first: the end of a tensor may run Python's code, and other threads, that come
    // here.
    const auto over = std::stable_partition(orphans_.begin(), orphans_.end(), [](const Orphan& o) {
      return o.operation->may_be_touched();
    });
    const std::vector<Orphan> released(std::make_move_iterator(over),
                                       std::make_move_iterator(orphans_.end()));
    orphans_.erase(over, orphans_.end());
  }

  static Stream stream_for(const Submission& s, py::handle tensor) {
    const Device device = device_of(s);
    return device.kind == DeviceKind::kCpu ? nullptr : stream_of(tensor, device);
  }

  std::unique_ptr<Engine> engine_;
  std::unique_ptr<DumpSignal> dump_signal_;  // ends before the engine
  std::string header_ = "{}";                // guarded by the GIL
  std::optional<NativeApi> native_;          // of engine_
  bool abandoned_ = false;
  std::vector<Orphan> orphans_;  // guarded by the GIL
};

PyHandle::~PyHandle() {
  if (operation->may_be_touched()) engine->adopt(std::move(operation), std::move(keep));
}

void PyHandle::wait(std::optional<std::uintptr_t> stream) {
  std::optional<Stream> after;
  if (stream) after = reinterpret_cast<Stream>(*stream);
  engine->wait(operation, after);
  held = true;
}

// The shortest ways for one dense tensor in place, by the vector call protocol: pybind11's
// dispatch would cost as much as the collective. Arguments: engine, kind, name, tensor, op,
// root, prescale, postscale, process_set, priority.
Submission in_place_submission(PyObject* const* args, Py_ssize_t count) {
  if (count != 10) throw py::type_error("expected 10 positional arguments");
  Submission s;
  s.kind = static_cast<OpKind>(PyLong_AsLong(args[1]));
  Py_ssize_t length = 0;
  const char* name = args[2] == Py_None ? nullptr : PyUnicode_AsUTF8AndSize(args[2], &length);
  if (name != nullptr) s.name.assign(name, static_cast<std::size_t>(length));
  if (args[2] == Py_None) leave_unnamed(s);
  s.op = static_cast<ReduceOp>(PyLong_AsLong(args[4]));
  s.root = static_cast<int>(PyLong_AsLong(args[5]));
  s.scale = {PyFloat_AsDouble(args[6]), PyFloat_AsDouble(args[7])};
  s.process_set = static_cast<ProcessSetId>(PyLong_AsUnsignedLong(args[8]));
  s.priority = static_cast<int>(PyLong_AsLong(args[9]));
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return s;
}

// What `call` returns, or null and Python's exception for what it throws. Not noexcept: a thread
// that runs Python's code in there may be ended by pthread_exit().
template <class Call>
PyObject* guarded(Call&& call) {
  try {
    return call();
  } catch (const Failure& failure) {
    raise_as_python(failure.error());
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* run_in_place(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    Submission s = in_place_submission(args, count);
    py::handle(args[0]).cast<PyEngine&>().run(std::move(s), args[3]);
    return py::bool_(true).release().ptr();
  });
}

PyObject* start_in_place(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    Submission s = in_place_submission(args, count);
    return py::cast(py::handle(args[0]).cast<PyEngine&>().start(std::move(s), args[3]))
        .release()
        .ptr();
  });
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef vector_call(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL,
          "See _core.pyi."};
}
PyMethodDef kRunInPlace = vector_call<run_in_place>("run");
PyMethodDef kStartInPlace = vector_call<start_in_place>("start");

std::uint32_t checksum(const py::buffer& bytes) {
  const py::buffer_info info = bytes.request();
  const WithoutGil without_gil;
  return crc32c({static_cast<const std::byte*>(info.ptr),
                 static_cast<std::size_t>(info.size * info.itemsize)});
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      raise_as_python(failure.error());
    }
  });

  py::dict dtypes;
  for (int i = 0; i < kDTypeCount; ++i) {
    dtypes[py::str(std::string(name_of(static_cast<DType>(i))))] = i;
  }
  m.attr("DTYPES") = dtypes;
  py::list errors;
  for (const ErrorKind& kind : kErrorKinds) {
    errors.append(py::make_tuple(static_cast<int>(kind.code), kind.class_name, kind.ends_engine,
                                 kind.is_consequence));
  }
  m.attr("ERRORS") = py::tuple(errors);
  m.attr("INSTRUCTION_SET") = std::string(host::instruction_set());
  m.def("begin_end_of_program", &EndOfProgram::begin);
  m.def("watch_system_exits", &watch_system_exits, py::arg("watch"));
  m.def("crc32c", &checksum, py::arg("bytes"));
  m.def("segment_bytes", &shm::Segment::bytes, py::arg("local_size"));
  m.attr("run") = py::reinterpret_steal<py::object>(PyCFunction_New(&kRunInPlace, nullptr));
  m.attr("start") = py::reinterpret_steal<py::object>(PyCFunction_New(&kStartInPlace, nullptr));
  m.def("register_dlpack_exchange", &register_dlpack_exchange);

  py::class_<TensorRef>(m, "TensorRef")
      .def(py::init([](std::uintptr_t address, Shape shape, const std::string& dtype,
                       py::object owner, std::optional<int> gpu, std::uintptr_t stream) {
             const Device device = gpu ? Device{DeviceKind::kCuda, *gpu} : Device{};
             return TensorRef{
                 {reinterpret_cast<void*>(address), std::move(shape), parse_dtype(dtype), device},
                 std::move(owner),
                 reinterpret_cast<Stream>(stream)};
           }),
           py::arg("address"), py::arg("shape"), py::arg("dtype"), py::arg("owner"),
           py::arg("gpu") = py::none(), py::arg("stream") = 0);

  py::class_<PyBuffer>(m, "Buffer", py::buffer_protocol())
      .def_buffer([](PyBuffer& self) {
        const OwnedBuffer& b = *self.buffer;
        if (b.device().kind != DeviceKind::kCpu) {
          throw py::buffer_error("the memory is on a GPU; get it through DLPack");
        }
        const auto bytes =
            element_count(b.shape()) * static_cast<std::int64_t>(item_size(b.dtype()));
        return py::buffer_info(b.data(), 1, py::format_descriptor<std::uint8_t>::format(), 1,
                               {bytes}, {std::int64_t{1}});
      })
      .def_property_readonly(
          "shape", [](const PyBuffer& self) { return py::tuple(py::cast(self.buffer->shape())); })
      .def_property_readonly(
          "dtype", [](const PyBuffer& self) { return std::string(name_of(self.buffer->dtype())); })
      .def_property_readonly("address",
                             [](const PyBuffer& self) {
                               return reinterpret_cast<std::uintptr_t>(self.buffer->data());
                             })
      .def_property_readonly("gpu",
                             [](const PyBuffer& self) -> std::optional<int> {
                               const Device device = self.buffer->device();
                               if (device.kind == DeviceKind::kCpu) return std::nullopt;
                               return device.index;
                             })
      .def(
          "__dlpack__",
          [](const PyBuffer& self, const py::object& stream, const py::kwargs&) {
            return self.to_consumer(stream);
          },
          py::kw_only(), py::arg("stream") = py::none())
      .def("__dlpack_device__", [](const PyBuffer& self) {
        const Device device = self.buffer->device();
        const bool on_cpu = device.kind == DeviceKind::kCpu;
        return std::pair<int, int>(on_cpu ? kDlpackCpu : kDlpackCuda, on_cpu ? 0 : device.index);
      });

  py::class_<PyHandle>(m, "Handle")
      .def("done", &PyHandle::done)
      .def("wait", &PyHandle::wait, py::arg("stream") = py::none())
      .def("buffers",
           [](const PyHandle& self) {
             py::list list;
             for (const auto& buffer : self.operation->buffers)
               list.append(PyBuffer{buffer, self.operation->arrived});
             return list;
           })
      .def_property_readonly("name", &PyHandle::name)
      .def_property_readonly("number", [](const PyHandle& self) { return self.operation->number; })
      .def_readwrite("result", &PyHandle::result)
      .def_readwrite("finish", &PyHandle::finish)
      .def_readwrite("slot", &PyHandle::slot);

  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox")
      .def(py::init<int, int>(), py::arg("signal") = 0, py::arg("descriptor") = -1)
      .def("wait", &Mailbox::wait, py::call_guard<WithoutGil>())
      .def("take_line",
           [](Mailbox& self) -> py::object {
             const auto line = self.take_line();
             if (!line) return py::none();
             return py::make_tuple(readable(line->text), line->is_debug);
           })
      .def("take_sample", &Mailbox::take_sample)
      .def("take_question", &Mailbox::take_question)
      .def("answer", &Mailbox::answer)
      .def("remark", &Mailbox::remark, py::arg("text"))
      .def("close", &Mailbox::close);

  py::class_<StepSample>(m, "StepSample")
      .def_readonly("bytes", &StepSample::bytes)
      .def_readonly("seconds", &StepSample::seconds)
      .def_readonly("steps", &StepSample::steps)
      .def_readonly("fingerprint", &StepSample::fingerprint);

  py::class_<Tuning>(m, "Tuning")
      .def(py::init([](std::uint64_t fusion_bytes_max, std::uint32_t cycle_us,
                       std::uint32_t chunk_bytes, std::uint32_t direct_bytes_max) {
             return Tuning{fusion_bytes_max, cycle_us, chunk_bytes, direct_bytes_max};
           }),
           py::kw_only(), py::arg("fusion_bytes_max"), py::arg("cycle_us"), py::arg("chunk_bytes"),
           py::arg("direct_bytes_max"))
      .def(py::self == py::self)
      .def_readonly("fusion_bytes_max", &Tuning::fusion_bytes_max)
      .def_readonly("cycle_us", &Tuning::cycle_us)
      .def_readonly("chunk_bytes", &Tuning::chunk_bytes)
      .def_readonly("direct_bytes_max", &Tuning::direct_bytes_max);

  define_mpi(m);
  define_copies(m);
  define_sketches(m);

  py::class_<PyTimelineFile>(m, "TimelineFile").def("close", &PyTimelineFile::close);
  py::class_<PyEngine, std::shared_ptr<PyEngine>>(m, "Engine")
      .def(py::init<const py::object&, const py::object&, const py::object&,
                    const std::shared_ptr<Mailbox>&, const std::string&, const py::object&,
                    std::shared_ptr<mpi::JobCommunicator>>(),
           py::arg("connections"), py::arg("settings"), py::arg("placement"), py::arg("mailbox"),
           py::arg("job"), py::arg("nccl_libraries") = py::tuple(), py::arg("mpi") = py::none())
      .def("submit", &PyEngine::submit, py::arg("kind"), py::arg("name"), py::arg("inputs"),
           py::arg("outputs"), py::arg("op") = 1, py::arg("root") = -1, py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("process_set") = 0, py::arg("priority") = 0,
           py::arg("blocking") = false, py::arg("numbers") = std::vector<std::int64_t>{},
           py::arg("generation") = 0)
      .def("take_turn", &PyEngine::take_turn)
      .def("process_sets", &PyEngine::process_sets)
      .def("counters", &PyEngine::counters)
      .def("native_api", &PyEngine::native_api, py::arg("version"))
      .def("shutdown", &PyEngine::shutdown, py::arg("words") = "")
      .def("abort", &PyEngine::abort)
      .def("abandon", &PyEngine::abandon)
      .def("set_header", &PyEngine::set_header, py::arg("json"))
      .def("start_timeline", &PyEngine::start_timeline, py::arg("path"), py::arg("mark_cycles"),
           py::arg("bytes_max"))
      .def("stop_timeline", &PyEngine::stop_timeline)
      .def("add_data_wait", &PyEngine::add_data_wait, py::arg("begin_ns"), py::arg("end_ns"))
      .def("hand_over_timeline", &PyEngine::hand_over_timeline)
      .def("take_over_timeline", &PyEngine::take_over_timeline, py::arg("file"))
      .def("tune", &PyEngine::tune, py::arg("tuning"))
      .def_property_readonly("tuning", &PyEngine::tuning)
      .def("notify", &PyEngine::notify, py::arg("notice"))
      .def_property_readonly("notice", &PyEngine::notice)
      .def_property("behind", &PyEngine::is_behind, &PyEngine::set_behind)
      .def_property_readonly("has_lost_results", &PyEngine::has_lost_results)
      .def_property_readonly("are_devices_done", &PyEngine::are_devices_done)
      .def_property_readonly("waits", &PyEngine::waits)
      .def_property_readonly("step_s", &PyEngine::step_s)
      .def_property_readonly("dead_here", &PyEngine::dead_here)
      .def_property_readonly("generation", &PyEngine::generation);
}

}  // namespace polyhvd
