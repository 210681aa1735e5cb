# make                 library and command, into build/ (the command is build/lowkey)
# make demo            the main job on real activations that ship with the project: fit, pack, attend, a table and a plot
# make test            every test (T=word: only test files whose name holds the word)
# make SAN=1 test      the same under ASan and UBSan
# make test-full       every test, those too that take long
# make fuzz            libFuzzer (needs clang) on quantizer files, FUZZ=60 seconds of it; finds go to build/fuzz
# make model           SmolLM2-135M-Instruct as build/model/*.model.h5, WikiText-2 as tokens.h5 beside it
# make texts           texts that are not WikiText (prose, code, licences, a mixture), as tokens.h5; texts-gemma: Gemma's
# make model-gemma     Gemma 3 270M, under Gemma's own terms, and WikiText-2 in its tokens
# make V=1             with the commands in full
# make damage          what formats do to attention, all layers, into experiments/results (half an hour)
# make quality         what formats cost in loss and KL: the main table, a plot; quality-full, quality-texts, quality-ablation
#                      the others (scripts/quality_lists.sh says what is fitted and measured; many hours)
# make fit-scale       calibration's time, memory, determinism, into experiments/results
# make bench-solvers   codebook solvers side by side, into experiments/results/solvers.csv
# make install PREFIX=/usr/local [DESTDIR=]
#
# What is missing is installed first (scripts/setup.sh says in a line what): Debian packages, and for tests, demo and
# model a Python environment under build/venv.

CC     ?= cc
CFLAGS ?= -O3 -g
SAN    ?= 0
V      ?= 0
PREFIX ?= /usr/local

B      := build/$(if $(filter 1,$(SAN)),san,opt)
python := build/venv/bin/python

# Ours are in lower case. The caller's CFLAGS come first, so that contraction stays off and sanitizers on.
cppflags := -I. -D_GNU_SOURCE -MMD -MP
cflags   := -std=c11 -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wdouble-promotion \
            -Werror -ffp-contract=off -fvisibility=hidden -fPIC
# openblas before gsl, which brings a slow cblas of its own: the first one linked is the one used.
packages := hdf5 openblas gsl libcrypto jansson
# pkg-config is asked when a recipe runs: it may have been installed by then.
ldlibs   := $$(pkg-config --libs $(packages)) -lm -lpthread
ifeq ($(SAN),1)
  cflags  += -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
  ldflags := -fsanitize=address,undefined
endif

objects  = $(patsubst %,$B/%.o,$(wildcard $(1:%=%/*.c)))
library := $(call objects,formats kernels runtime)
tools   := $(filter-out %/lowkey.c.o %/commit.c.o,$(call objects,calib experiments experiments/lm experiments/peers notebooks-export))
tests   := $(patsubst %.c,$B/%,$(wildcard tests/test_*.c))
support := $(filter-out $B/tests/test_%,$(call objects,tests))

q := $(if $(filter 0,$V),@)

all: $B/lowkey $B/liblowkey.so $B/liblowkey-h5.so $B/liblowkey-h5.a
	@ln -sfn $(B:build/%=%)/lowkey build/lowkey

$B/lowkey: $B/experiments/lowkey.c.o $B/experiments/commit.c.o $B/libtools.a $B/liblowkey.a
	$(if $q,@echo '  $@')
	$q$(CC) $(ldflags) $(LDFLAGS) -o $@ $^ $(ldlibs) $(LDLIBS)
$B/tests/test_%: $B/tests/test_%.c.o $(support) $B/libtools.a $B/liblowkey.a
	$(if $q,@echo '  $@')
	$q$(CC) $(ldflags) $(LDFLAGS) -o $@ $(filter %.o,$^) $(filter %.a,$^) $$(pkg-config --libs cmocka) $(ldlibs) $(LDLIBS)
# Our requests for memory go through this test's own functions, so that they can fail.
comma := ,
$B/tests/test_memory_h5: ldflags += $(addprefix -Wl$(comma)--wrap=,malloc calloc realloc aligned_alloc strdup strndup free)
$B/liblowkey.a: $(library)
$B/liblowkey-h5.a: $(filter %_h5.c.o,$(library))
$B/libtools.a: $(tools)
$B/liblowkey.a $B/liblowkey-h5.a $B/libtools.a:
	@mkdir -p $(@D) && rm -f $@ && $(AR) rcs $@ $^
# The core links no HDF5: the reader of quantizer.h5 is a library of its own.
$B/liblowkey.so: $(filter-out %_h5.c.o,$(library))
	$(if $q,@echo '  $@')
	$q$(CC) $(ldflags) $(LDFLAGS) -shared -Wl,-soname,liblowkey.so.0 -Wl,-z,defs -o $@ $^ -lm
$B/liblowkey-h5.so: $(filter %_h5.c.o,$(library)) $B/liblowkey.a
	$(if $q,@echo '  $@')
	$q$(CC) $(ldflags) $(LDFLAGS) -shared -Wl,-soname,liblowkey-h5.so.0 -Wl,-z,defs -o $@ $^ $$(pkg-config --libs hdf5 libcrypto) -lm

# A file's name says what it needs; on other machines such a file is empty.
ifeq ($(shell uname -m),x86_64)
$B/%_avx2.c.o:   cflags += -mavx2 -mfma -mf16c
$B/%_avx512.c.o: cflags += -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vnni -mavx512bf16 -mfma -mf16c
endif
$B/%.c.o: %.c Makefile | build/.packages
	@mkdir -p $(@D)
	$(if $q,@echo '  $@')
	$q$(CC) $(cppflags) $(CPPFLAGS) $$(pkg-config --cflags $(packages) cmocka) $(CFLAGS) $(cflags) -c -o $@ $<

# The commit that the command says it is of; written where it has changed. Results and prose do not change what it does.
$B/commit.h: FORCE
	@mkdir -p $(@D)
	@commit=$$(git describe --always --match=none 2>/dev/null) || commit=unknown; \
	    [ $$commit = unknown ] || git diff --quiet HEAD -- . ':!experiments/results' ':!*.md' || commit=$$commit-dirty; \
	    echo "#define LOWKEY_COMMIT \"$$commit\"" | cmp -s - $@ || echo "#define LOWKEY_COMMIT \"$$commit\"" >$@
$B/experiments/commit.c.o: $B/commit.h
$B/experiments/commit.c.o: cppflags += -include $B/commit.h

build/.packages: scripts/setup.sh
	@mkdir -p build
	@scripts/setup.sh packages && touch $@
build/venv/.done: requirements.txt | scripts/setup.sh build/.packages
	@scripts/setup.sh python $< build/venv && touch $@

# A real model, and text in its tokens.
gguf   := build/model/SmolLM2-135M-Instruct.Q4_1.gguf
models := build/model/smollm2-135m.model.h5 build/model/wiki.valid.tokens.h5 build/model/wiki.test.tokens.h5
model: $(models)
$(gguf): scripts/fetch_model.sh | build/venv/.done
	@mkdir -p $(@D)
	@scripts/fetch_model.sh $(python) $@ && touch $@
converter := experiments/convert_model.py experiments/gemma.py experiments/rope_scaling.py experiments/artefact.py
tokenizer := experiments/tokenize_text.py $(converter)
build/model/smollm2-135m.model.h5: $(converter) $(gguf) | build/venv/.done
	$(python) $< $(gguf) $@ --name SmolLM2-135M-Instruct
build/model/wiki.%.tokens.h5: experiments/data/wikitext-2/wiki.%.raw $(tokenizer) $(gguf) | build/venv/.done
	$(python) experiments/tokenize_text.py $(gguf) $< $@ --name SmolLM2-135M-Instruct

# A second family: the user fetches it, and nothing of it is here. Its texts come in sequences that begin with BOS, without
# which Gemma predicts badly.
gemma := build/model/gemma-3-270m.Q4_K_M.gguf
to_gemma = $(python) experiments/tokenize_text.py $(gemma) $(1) $@ --name gemma-3-270m --add-bos --sequence 1024
.PHONY: model-gemma
model-gemma: build/model/gemma3-270m.model.h5 build/model/gemma3.wiki.valid.tokens.h5 build/model/gemma3.wiki.test.tokens.h5
$(gemma): scripts/fetch_gemma.sh | build/venv/.done
	@mkdir -p $(@D)
	@scripts/fetch_gemma.sh $(python) $@ && touch $@
build/model/gemma3-270m.model.h5: $(converter) $(gemma) | build/venv/.done
	$(python) $< $(gemma) $@ --name gemma-3-270m
build/model/gemma3.wiki.%.tokens.h5: experiments/data/wikitext-2/wiki.%.raw $(tokenizer) $(gemma) | build/venv/.done
	$(call to_gemma,$<)

# Other texts, a part to fit on and a part to evaluate on; mixture.fit has equal shares of three, in sequences.
texts := prose.fit prose.eval code.fit code.eval licences.eval
mixture := experiments/data/wikitext-2/wiki.valid.raw build/model/texts/code.fit.txt build/model/texts/prose.fit.txt
.PHONY: texts texts-gemma
texts: $(texts:%=build/model/%.tokens.h5) build/model/mixture.fit.tokens.h5
texts-gemma: $(texts:%=build/model/gemma3.%.tokens.h5) build/model/gemma3.mixture.fit.tokens.h5
$(texts:%=build/model/texts/%.txt) &: scripts/fetch_texts.sh experiments/texts.py | build/venv/.done
	@scripts/fetch_texts.sh $(python) build/model/texts && touch build/model/texts/*.txt
build/model/%.tokens.h5: build/model/texts/%.txt $(tokenizer) $(gguf)
	$(python) experiments/tokenize_text.py $(gguf) $< $@ --name SmolLM2-135M-Instruct
build/model/mixture.fit.tokens.h5: $(mixture) $(tokenizer) $(gguf)
	$(python) experiments/tokenize_text.py $(gguf) $(mixture) $@ --name SmolLM2-135M-Instruct --sequence 2048
build/model/gemma3.%.tokens.h5: build/model/texts/%.txt $(tokenizer) $(gemma)
	$(call to_gemma,$<)
build/model/gemma3.mixture.fit.tokens.h5: $(mixture) $(tokenizer) $(gemma)
	$(call to_gemma,$(mixture))

demo: all build/venv/.done
	@scripts/demo.sh

# What formats do to attention, on all layers and enough tokens to judge by; about half an hour on two cores.
capture := build/damage/capture.activations.h5
$(capture): $(models) | all
	@mkdir -p $(@D)
	build/lowkey capture --model $(firstword $(models)) --tokens $(word 2,$(models)) --samples 16 --length 2048 --out $@
damage: $(capture) all build/venv/.done
	scripts/damage.sh $(capture) 0:8 8:16 build/damage
	awk -v commit="$$(git rev-parse --short HEAD)" '{ print $$0 "," (NR == 1 ? "commit" : commit) }' build/damage/damage.csv \
	    >experiments/results/damage.csv
	cp build/damage/damage.png experiments/results/

# What formats cost in loss and KL, into experiments/results; each goes on where it was stopped.
quality := quality quality-captures quality-fit quality-full quality-ablation
.PHONY: $(quality) quality-texts
$(quality) quality-texts: all build/venv/.done
	scripts/quality.sh $(patsubst quality-%,%,$(@:quality=quality-short))
$(quality): $(models)
quality-texts: model texts model-gemma texts-gemma

# Calibration's time, memory and determinism.
fit-scale: all build/venv/.done $(models)
	$(python) experiments/fit_scale.py

test: all $(tests) build/venv/.done $(models)
	@$(CC) -std=c11 -pedantic -Wc++-compat -Werror -fsyntax-only runtime/lowkey.h
	@B=$B SAN=$(SAN) tests/run.sh $(T)
test-full: all $(tests) build/venv/.done $(models)
	@B=$B SAN=$(SAN) FULL=1 tests/run.sh $(T)

# HDF5 itself crashes on some files: libFuzzer forks and goes on, and each crash's stack says whose it is.
FUZZ ?= 60
$B/fuzz_quantizer: $B/tests/fuzz_quantizer.c.o $B/liblowkey.a
	$q$(CC) $(ldflags) -fsanitize=fuzzer $(LDFLAGS) -o $@ $^ $(ldlibs) $(LDLIBS)
fuzz: | build/.packages
	@$(MAKE) CC=clang SAN=1 B=build/fuzz CFLAGS='-g -fsanitize=fuzzer-no-link' build/fuzz/fuzz_quantizer
	@mkdir -p build/fuzz/corpus && cp tests/golden/*.h5 build/fuzz/corpus
	build/fuzz/fuzz_quantizer -fork=1 -ignore_crashes=1 -ignore_timeouts=1 -timeout=5 -max_total_time=$(FUZZ) \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus || [ $$? = 70 ] # it found some

build/venv-bench/.done: experiments/requirements-bench.txt | scripts/setup.sh build/.packages
	@scripts/setup.sh python experiments/requirements-bench.txt build/venv-bench && touch $@
bench-solvers: all build/venv-bench/.done
	build/venv-bench/bin/python experiments/compare_solvers.py $(if $(CAPTURE),--capture $(CAPTURE))

install: all
	@scripts/install.sh $B '$(PREFIX)' '$(DESTDIR)'

clean:
	rm -rf build/opt build/san build/fuzz build/lowkey
FORCE:
.PHONY: FORCE all demo damage fit-scale model test test-full fuzz bench-solvers install clean
.SECONDARY:
-include $(shell find $B -name '*.d' 2>/dev/null)
