comma := ,
# Every habit has a verb. `make help` lists them.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= $(shell nproc)
STAMPS := build/stamps
# Without compiled modules each process of a test would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# A compiler cache, where one is installed, compiles nothing twice, in a fresh clone either: paths below the
# checkout do not count.
CCACHE := $(shell command -v ccache)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
CXX := $(CCACHE) g++

.PHONY: help setup demo test check bench asan tsan core fuzz faults matrix clean
help:
	@sed -n 's/^##@ //p' Makefile

# Installing --------------------------------------------------------------------

# The extension is rebuilt when a source of it changes.
SOURCES := setup.py pyproject.toml $(wildcard polyhvd/csrc/*/* backends/* backends/*/* backends/*/*/* frameworks/*/*.cc frameworks/*/*.h) $(wildcard frameworks/*/__init__.py)

$(PY):
	sh tools/python.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/base: requirements/base.txt | $(PY)
	$(PY) -m pip install -q -r requirements/base.txt
	@mkdir -p $(STAMPS) && touch $@

# What is made of the tables of collectives and options. The build makes it, too; this, when only they have changed.
VERBS := $(patsubst %/dialect.py,%/verbs.py,$(wildcard frameworks/*/dialect.py)) \
	$(patsubst %/signatures.py,%/wrappers.py,$(wildcard frameworks/*/signatures.py frameworks/*/*/signatures.py))
TABLE := $(wildcard polyhvd/collectives/table/*.py)
GENERATE = @$(PY) polyhvd/collectives/table/generator.py $* && touch $@
frameworks/%/verbs.py: frameworks/%/dialect.py $(TABLE) | $(PY)
	$(GENERATE)
frameworks/%/wrappers.py: frameworks/%/signatures.py $(TABLE) | $(PY)
	$(GENERATE)

$(STAMPS)/build: $(SOURCES) $(STAMPS)/base | $(VERBS)
	$(if $(CCACHE),CC="$(CCACHE) gcc" CXX="$(CCACHE) g++") MAX_JOBS=$(JOBS) \
		$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: requirements/demo.txt $(STAMPS)/build
	sh tools/apt.sh libgomp1 libquadmath0
	$(PY) -m pip install -q -r requirements/demo.txt
	@mkdir -p $(STAMPS) && touch $@

# pip compiles no modules, most of which are never imported; it may run beside the compiler.
$(STAMPS)/packages: $(wildcard requirements/*.txt) $(STAMPS)/base
	$(PY) -m pip install -q --no-compile -r requirements/demo.txt -r requirements/test.txt
	$(PY) -m pip install -q --no-compile --no-deps -r requirements/test-nodeps.txt
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/apt: Makefile
	sh tools/apt.sh libgomp1 libquadmath0 doctest-dev openmpi-bin libopenmpi-dev openssh-server openssh-client iproute2 dataset-fashion-mnist valgrind slurm-wlm munge dnsmasq-base zsh
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test: $(STAMPS)/packages $(STAMPS)/build $(STAMPS)/apt
	@touch $@

##@ setup    create .venv, build and install polyhvd into it
setup: $(STAMPS)/build

##@ demo     train a Gluon network on 2 ranks on handwritten digits
demo: $(STAMPS)/demo
	$(VENV)/bin/polyhvdrun -np 2 $(PY) examples/mxnet_gluon_digits.py

# Testing -----------------------------------------------------------------------

CORE_SOURCES := $(filter-out polyhvd/csrc/python/%,$(wildcard polyhvd/csrc/*/*.cc)) \
	$(wildcard backends/*.cc backends/*/*.cc backends/*/*/*.cc)
CORE_TESTS := $(wildcard tests/core/*.cc tests/gpu/*.cc)
CORE_FLAGS := -std=c++20 -g1 -Wall -Wextra -Werror -ffp-contract=off -Ipolyhvd/csrc -Ibackends -Itests/core -MMD -MP -pthread

# What is too slow for a release: the order of locks (polyhvd/csrc/observe/lock_order.h).
CHECKED := -DPOLYHVD_CHECK_LOCK_ORDER

# What `make setup` has compiled: the core's own tests need no second compilation.
OBJECTS = build/objects/$(shell $(PY) -c 'import sys; print(sys.implementation.cache_tag)')
INSTALLED = $(CORE_SOURCES:%.cc=$(OBJECTS)/%.o)

# $(call core_objects,variant,flags): how objects of a variant are compiled.
define core_objects
build/core/$(1)/%.o: %.cc | $(STAMPS)/apt
	@mkdir -p $$(@D)
	$$(CXX) $$(CORE_FLAGS) $(2) $$(LESS) -c $$< -o $$@
# Optimising tests takes longer than it saves when they run, except under ThreadSanitizer. The checks of
# UndefinedBehaviorSanitizer would triple the time that doctest's macros take the compiler.
build/core/$(1)/tests/%.o: LESS := $(if $(filter tsan,$(1)),,-O0) $(if $(filter asan,$(1)),-fno-sanitize=undefined)
-include $$(CORE_SOURCES:%.cc=build/core/$(1)/%.d) $$(CORE_TESTS:%.cc=build/core/$(1)/%.d)
endef
# $(call core_program,variant,flags): build/core/<variant>/run with all sources compiled anew.
define core_program
$(call core_objects,$(1),$(2))
build/core/$(1)/run: $$(CORE_SOURCES:%.cc=build/core/$(1)/%.o) $$(CORE_TESTS:%.cc=build/core/$(1)/%.o)
	$$(CXX) $(2) -pthread $$^ -o $$@
endef
$(eval $(call core_objects,plain,-O2))
$(eval $(call core_program,asan,-O1 -fno-omit-frame-pointer -fsanitize=address$(comma)undefined -fno-sanitize-recover=all $(CHECKED)))
$(eval $(call core_program,tsan,-O1 -fno-omit-frame-pointer -fsanitize=thread $(CHECKED)))
build/core/plain/run: $(CORE_TESTS:%.cc=build/core/plain/%.o) $(STAMPS)/build
	$(CXX) -pthread $(INSTALLED) $(filter %.o,$^) -o $@
-include $(wildcard build/core/plain/benchmarks/*.d)

# The pure units as a module for tests in Python; nothing of it is installed.
UNITS := $(wildcard polyhvd/csrc/control/*.cc)
UNITS_OBJECTS := $(UNITS:%.cc=build/core/python/%.o) build/core/python/tests/core/python/units.o
UNITS_MODULE := build/core/python/polyhvd_units.so
build/core/python/%.o: %.cc | $(STAMPS)/base
	@mkdir -p $(@D)
	$(CXX) $(CORE_FLAGS) -O1 -fPIC -fvisibility=hidden -D_GLIBCXX_ASSERTIONS $$($(PY) -m pybind11 --includes) -c $< -o $@
$(UNITS_MODULE): $(UNITS_OBJECTS)
	$(CXX) -shared $^ -o $@
-include $(UNITS_OBJECTS:.o=.d)
.PHONY: units
units: $(UNITS_MODULE)

# Test doubles of the libraries that a GPU comes with, for machines without one.
GPU_LIBRARIES := build/gpu/libcuda.so.1 \
	$(if $(wildcard tests/gpu/stand_in/nccl.cc),build/gpu/libnccl.so.2)
.PHONY: stand-ins
stand-ins: $(GPU_LIBRARIES)
define stand_in
$(1): tests/gpu/stand_in/$(2).cc $(wildcard tests/gpu/stand_in/*.h)
	@mkdir -p $$(@D)
	$$(CXX) -std=c++20 -O2 -g1 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -shared -pthread \
		-Wl,-soname,$$(@F) $$< -o $$@
endef
$(eval $(call stand_in,build/gpu/libcuda.so.1,cuda))
$(eval $(call stand_in,build/gpu/libnccl.so.2,nccl))

##@ core     the C++ core's tests: pure units, and engines as threads
core: build/core/plain/run build/core/plain/instructions stand-ins
	build/core/plain/run

##@ asan     the same under AddressSanitizer and UndefinedBehaviorSanitizer
# A thread-local block of a library opened at run time that begins 16 bytes into a page is
# taken for one of an older glibc, and the search for leaks then ends in a crash of its own.
asan: build/core/asan/run stand-ins
	ASAN_OPTIONS=intercept_tls_get_addr=0 build/core/asan/run

# They compute in one thread, and take a third of the time.
ONE_THREAD := *test_coordinator.cc,*test_kernels.cc,*test_sketch.cc

##@ tsan     the same under ThreadSanitizer, without tests that have only one thread
tsan: build/core/tsan/run stand-ins
	TSAN_OPTIONS=halt_on_error=1 build/core/tsan/run --source-file-exclude='$(ONE_THREAD)'

FUZZ_SECONDS ?= 600
FUZZ_SOURCES := $(wildcard tests/fuzz/*.cc)
FUZZED := $(patsubst %,polyhvd/csrc/control/%.cc,crc32c framing mac signed_framing types wire)
FUZZ_FLAGS := -O1 -fno-omit-frame-pointer -fsanitize=address$(comma)undefined -fno-sanitize-recover=all

build/fuzz/polyhvd/%.o: FUZZ_FLAGS += -fsanitize-coverage=trace-pc
build/fuzz/%.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CORE_FLAGS) $(FUZZ_FLAGS) -c $< -o $@
build/fuzz/run: $(FUZZED:%.cc=build/fuzz/%.o) $(FUZZ_SOURCES:%.cc=build/fuzz/%.o)
	$(CXX) $(FUZZ_FLAGS) $^ -o $@
-include $(FUZZED:%.cc=build/fuzz/%.d) $(FUZZ_SOURCES:%.cc=build/fuzz/%.d)

##@ fuzz     the decoder of control messages under random bytes, for FUZZ_SECONDS (600)
fuzz: build/fuzz/run
	build/fuzz/run tests/fuzz/corpus $(FUZZ_SECONDS)

FAULT_CASES ?= 300
FAULT_SEED ?=

##@ faults   random faults in FAULT_CASES (300) random jobs, or the one of FAULT_SEED
faults: $(STAMPS)/test
	POLYHVD_TEST_FAULT_CASES=$(FAULT_CASES) POLYHVD_TEST_FAULT_SEED=$(FAULT_SEED) \
		$(PY) -m pytest -q tests/backends/test_random_faults.py

SOAK_KILLS ?= 1000
SOAK_SEED ?= 1
SOAK_FRAMEWORK ?= numpy
SOAK_FORM ?=

##@ soak     SOAK_KILLS (1000) processes of elastic jobs in SOAK_FRAMEWORK (numpy) are killed, from SOAK_SEED on
.PHONY: soak
soak: $(STAMPS)/test
	$(PY) tests/elastic/soak.py --kills $(SOAK_KILLS) --seed $(SOAK_SEED) --framework $(SOAK_FRAMEWORK) \
		--form "$(SOAK_FORM)"

# Options of pytest.
TESTS ?=

##@ test     the core, the launcher, every adapter, parity, training: all but make slow's and make nightly's
test:
	$(MAKE) -j$(JOBS) $(STAMPS)/test core units stand-ins
	$(PY) tools/suite.py -m "not slow and not nightly" $(TESTS)

##@ coverage  the lines of the product that make test and make slow run, by folder; build/coverage/missed.txt has the others
# PyTorch's compiler refuses the marks, which are gone when an interpreter ends.
.PHONY: coverage
coverage: $(STAMPS)/test core units stand-ins
	$(PY) tools/coverage.py -m "not nightly" -k "not compil and not ends_within_an_iteration" $(TESTS)

##@ durations  the tests and files that have cost most in the last make test or make slow
.PHONY: durations
durations:
	$(PYTHON) tools/costs.py dearest

##@ test-gpu  tensors on GPUs with NCCL, on this machine's GPU instead of stand-ins
.PHONY: test-gpu
test-gpu: $(STAMPS)/test
	@$(PY) -c 'import sys; from polyhvd.runtime import gpu; found = gpu.probe_cuda(); \
		sys.exit(0 if isinstance(found, gpu.Found) else f"no GPU, so nothing was tested: {found}")'
	$(MAKE) stand-ins
	POLYHVD_TEST_GPU=1 $(PY) -m pytest -q -rs tests/gpu/test_nccl.py tests/gpu/test_nccl_faults.py
	NCCL_MULTI_RANK_GPU_ENABLE=1 TEST_CUDA_LIBRARY=libcuda.so.1 \
		$(VENV)/bin/polyhvdrun -np 2 $(PY) tests/gpu/bandwidth.py

##@ verbs    make frameworks/*/verbs.py and wrappers.py from the tables; what builds or tests does so, too
.PHONY: verbs
verbs: $(VERBS)

# Packages of its own, so that none of them decides the version of one that the tests have.
SITE_PY := build/docs-env/bin/python
$(STAMPS)/docs: requirements/docs.txt
	@mkdir -p $(STAMPS) && sh tools/python.sh $(PYTHON)
	$(PYTHON) -m venv build/docs-env
	$(SITE_PY) -m pip install -q --no-compile -r requirements/docs.txt && touch $@

##@ docs     the documentation as a website in build/site; a broken link or a missing reference is an error
.PHONY: docs
docs: $(STAMPS)/docs $(STAMPS)/base | $(VERBS)
	NO_MKDOCS_2_WARNING=1 $(SITE_PY) -m mkdocs -q build

##@ check    style: ruff, mypy, clang-format, layers, the table of collectives, English
check: $(STAMPS)/test
	$(VENV)/bin/ruff check . $(VERBS)
	$(VENV)/bin/ruff format --check . $(VERBS)
	$(PY) tools/typecheck.py
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard polyhvd/csrc/*/*.h polyhvd/csrc/*/*.cc backends/*.h backends/*.cc backends/*/*.h backends/*/*.cc backends/*/*/*.h backends/*/*/*.cc frameworks/*/*.h frameworks/*/*.cc tests/core/*.h tests/core/*.cc tests/core/python/*.cc tests/fuzz/*.h tests/fuzz/*.cc tests/gpu/*.cc tests/gpu/*/*.h tests/gpu/*/*.cc benchmarks/*.cc)
	$(PY) -m pytest -q tests/test_tidy.py tests/test_english.py tests/test_verbs.py

# Packages of its own, as for the documentation: none of them decides a version for the tests, or the other way.
WHEELS_PY := build/wheels-env/bin/python
$(STAMPS)/wheels: requirements/wheels.txt
	@mkdir -p $(STAMPS) && sh tools/python.sh $(PYTHON)
	$(PYTHON) -m venv build/wheels-env
	$(WHEELS_PY) -m pip install -q --no-compile -r requirements/wheels.txt && touch $@

WHEELS ?=

##@ wheels   for all versions of Python, x86-64 and aarch64, into dist/, or WHEELS="--python 3.12 --platform aarch64"
.PHONY: wheels
wheels: $(STAMPS)/wheels
	MAX_JOBS=$(JOBS) $(WHEELS_PY) tools/wheels.py $(WHEELS)

RELEASE ?=

##@ release  changelog, wheels, source distribution, checksums and bill of materials, then the tag; or RELEASE=--dry-run
.PHONY: release
release: $(STAMPS)/wheels
	MAX_JOBS=$(JOBS) $(WHEELS_PY) tools/release.py $(RELEASE)

BENCH ?=

##@ bench    latency and throughput beside all peers that are installed, in turns; options in BENCH
bench: $(STAMPS)/test
	$(PY) -m benchmarks $(BENCH)

##@ bench-peers  Ray Train and Horovod in separate environments, to measure elastic jobs beside them
.PHONY: bench-peers
bench-peers: $(STAMPS)/test
	$(PY) tools/bench_peers.py

build/core/plain/instructions: build/core/plain/benchmarks/instructions.o $(STAMPS)/build
	$(CXX) -pthread $< $(INSTALLED) -o $@

##@ instructions  count those of a small allreduce, and keep them in benchmarks/instructions.json
.PHONY: instructions
instructions: build/core/plain/instructions
	sh tools/apt.sh valgrind binutils
	$(PY) -m benchmarks.instructions --keep

build/core/plain/control_plane: build/core/plain/benchmarks/control_plane.o $(STAMPS)/build
	$(CXX) -pthread $< $(INSTALLED) -o $@

##@ control-plane  what agreement costs in jobs of up to 16384 ranks, simulated
.PHONY: control-plane
control-plane: build/core/plain/control_plane
	build/core/plain/control_plane

CASES ?= linear mlp cnn lstm gru transformer embedding resnet18

##@ parity   polyhvd parity of all cases (CASES) in all frameworks: five minutes
.PHONY: parity
parity: $(STAMPS)/test
	for case in $(CASES); do $(VENV)/bin/polyhvd parity $$case --frameworks mxnet,torch,tensorflow,numpy || exit; done

DEFECTS ?=

##@ defects  what polyhvd parity makes of seeded defects, all or DEFECTS="name ...": ten minutes
.PHONY: defects
defects: $(STAMPS)/test
	$(PY) tools/defects.py --jobs 2 $(DEFECTS)

##@ false-alarms  all clean cases over SEEDS seeds: nothing may be found to differ; ten minutes
SEEDS ?= 20
.PHONY: false-alarms
false-alarms: $(STAMPS)/test
	$(VENV)/bin/python tools/false_alarms.py --seeds $(SEEDS)

##@ nightly  all that make test, make slow and make matrix leave out: repeats, every number of ranks, long soaks
.PHONY: nightly
nightly: $(STAMPS)/test core units stand-ins
	$(PY) tools/bench_peers.py ray
	TEST_RANKS=all TEST_DEPTH=nightly $(PY) tools/suite.py $(TESTS)
	$(MAKE) -s parity CASES=resnet18
	$(MAKE) -s faults FAULT_CASES=300
	$(MAKE) -s soak SOAK_KILLS=30 SOAK_FORM=files
	for framework in numpy torch tensorflow keras mxnet; do $(MAKE) -s soak SOAK_KILLS=50 SOAK_FRAMEWORK=$$framework || exit; done
	$(MAKE) -s fuzz
	$(PY) tools/matrix.py --all

##@ slow     tests that wait or compute for long: several hosts, whole programs, the largest models
.PHONY: slow
slow: $(STAMPS)/test stand-ins
	$(PY) tools/suite.py -m "slow and not nightly" $(TESTS)

##@ matrix   the one wheel under other versions of every framework, each alone
matrix: $(STAMPS)/test stand-ins
	$(PY) tools/matrix.py

##@ setup-ray  install what make test-ray needs
.PHONY: setup-ray
setup-ray: $(STAMPS)/base
	$(PY) tools/matrix.py --prepare ray

##@ test-ray  the tests of polyhvd.ray on a real cluster of Ray; make matrix has them, too
.PHONY: test-ray
test-ray: $(STAMPS)/test stand-ins
	$(PY) tools/matrix.py ray

##@ setup-spark  install what make test-spark needs, but for Java
.PHONY: setup-spark
setup-spark: $(STAMPS)/base
	$(PY) tools/matrix.py --prepare spark-3.5 spark-4 spark-estimators

##@ test-spark  the tests of polyhvd.spark on real clusters of Spark 3.5 and 4; make matrix has them, too
.PHONY: test-spark
test-spark: $(STAMPS)/test stand-ins
	@command -v java >/dev/null || { echo "Spark needs Java 17 or newer, which is not installed. On Debian, as root:" \
		"apt-get install -y --no-install-recommends openjdk-17-jre-headless" >&2; exit 1; }
	$(PY) tools/matrix.py spark-3.5 spark-4 spark-estimators

##@ environments  install what make matrix needs
.PHONY: environments
environments: $(STAMPS)/base
	$(PY) tools/matrix.py --prepare

IMAGE_BUILDER ?= $(firstword $(foreach name,docker podman buildah,$(shell $(name) info >/dev/null 2>&1 && echo $(name))))

# A framework, the image to build on, such as one with CUDA, and the suffix of the tag: polyhvd:torch-cuda.
FRAMEWORK ?=
BASE ?=
SUFFIX ?= $(if $(findstring cuda,$(BASE)),cuda)
INDEX ?=
IMAGE_TAG = $(or $(FRAMEWORK)$(if $(and $(FRAMEWORK),$(SUFFIX)),-)$(SUFFIX),latest)
IMAGE_ARGUMENTS = $(foreach name,FRAMEWORK BASE INDEX,$(if $($(name)),--build-arg $(name)=$($(name))))

##@ image    the container image, by docker, podman or buildah, or polyhvd:torch with FRAMEWORK=torch; without IMAGE_BUILDER its steps in a folder, as root
.PHONY: image
image:
	$(if $(IMAGE_BUILDER),,sh tools/apt.sh debootstrap)
	$(or $(and $(IMAGE_BUILDER),$(IMAGE_BUILDER) build -t polyhvd:$(IMAGE_TAG) $(IMAGE_ARGUMENTS) .),$(PYTHON) tools/image.py)

##@ clean    remove what was built; .venv stays
clean:
	rm -rf build dist *.egg-info polyhvd/*.so frameworks/*/*.so $(VERBS)
