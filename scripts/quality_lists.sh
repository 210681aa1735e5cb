# quality_lists.sh - what scripts/quality.sh captures, fits and measures. Read by it; what is in capitals can be set from
# outside: make quality BUDGETS="2 2.5" SPREAD=8 QUALITY=build/few RESULTS=build/few
# shellcheck shell=sh disable=SC2034,SC2086

: "${LENGTH:=2048}"     # tokens of a sample and of a window; Gemma's are half as long, and twice as many are fitted on
: "${TEXT_SAMPLES:=16}" # fitted on with the gradients of the text's own labels: KVQuant's recipe, and peers that calibrate
: "${MODEL_SAMPLES:=32}" # fitted on with gradients of labels that the model draws: ours
: "${PER_FILE:=16}"     # samples a file of a capture; one that was stopped goes on behind the last whole file
: "${SPREAD:=32}"       # windows of the main table, spread evenly over the test text
: "${TEXT_SPREAD:=16}"  # of other texts and models
: "${VALID:=--first-window 96 --spread 8}" # of the valid text, behind what is fitted on: for choosing, and for the ablation
: "${BUDGETS:=2 2.25 2.5 3 3.5 4 4.5}"
: "${KVQUANT:=nuq2 nuq3 nuq4 nuq2-1% nuq3-1% nuq4-1%}"
: "${PEERS:=all}"       # formats of others in the main table; all: what lowkey eval --list says

# Captures: a name, how many samples of the text's beginning, options of lowkey capture
captures="
text    $TEXT_SAMPLES   --grad=text --queries yes
model   $MODEL_SAMPLES  --grad=model --queries no
queries $MODEL_SAMPLES  --queries yes
"

# Quantizers: a name, the captures they are fitted on, options of lowkey fit; "then" and options of lowkey tune, where tables are
# tuned afterwards. TUNED='then --steps 100 --end-window 128 --validation 128:136' would tune ours, on the text it is fitted on.
: "${TUNED:=}"
fits() {
    for recipe in $KVQUANT; do echo "kvquant-$recipe text.activations.*.h5 --preset kvquant-$recipe"; done
    echo "kvquant-nuq2-1%-qnorm text.activations.*.h5 --preset kvquant-nuq2-1% --qnorm"
    for budget in $BUDGETS; do echo "ours-$budget model.activations.*.h5 --preset 4 --budget $budget $TUNED"; done
}

# Other texts and the second model: model, text, what is calibrated on, which windows. licences.eval has 12 windows in all.
# mixture.fit is equal shares of WikiText-2 valid, code and novels.
: "${TEXTS:=
smollm2 wiki.test     mixture --spread $SPREAD
smollm2 prose.eval    wiki    --spread $TEXT_SPREAD
smollm2 prose.eval    mixture --spread $TEXT_SPREAD
smollm2 code.eval     wiki    --spread $TEXT_SPREAD
smollm2 code.eval     mixture --spread $TEXT_SPREAD
smollm2 licences.eval wiki
smollm2 licences.eval mixture
gemma3  wiki.test     wiki    --spread $TEXT_SPREAD
gemma3  wiki.test     mixture --spread $TEXT_SPREAD
gemma3  prose.eval    wiki    --spread $TEXT_SPREAD
gemma3  prose.eval    mixture --spread $TEXT_SPREAD
gemma3  code.eval     wiki    --spread $TEXT_SPREAD
gemma3  code.eval     mixture --spread $TEXT_SPREAD
}"
: "${TEXT_FITS:=kvquant-nuq2-1% kvquant-nuq3-1% kvquant-nuq4-1% $(printf 'ours-%s ' $BUDGETS)}"
: "${TEXT_PEERS:=kivi-4-g32 kivi-3-g32 kivi-2-g32 turboquant-3}"
: "${TEXT_CALIBRATED_PEERS:=watersic-2 watersic-2.5 watersic-3}"

# The ablation: the whole recipe at one budget, then one thing changed at a time. As in fits(). Flat bits are given to RoPE
# pairs, and to channels of values, in turn. Outliers need flat bits, no trellis, no tuning: flat-plain is the same without.
: "${ABLATION_BUDGET:=2.5}" "${ABLATION_FLAT:=2,3}"
ablations="
ours              model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET $TUNED
value-feedback    model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --feedback=both $TUNED
no-feedback       model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --feedback=none $TUNED
no-refit          model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --refit 0 $TUNED
no-trellis        model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --trellis 0 $TUNED
one-survivor      model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --trellis 1 $TUNED
${TUNED:+untuned model.activations.*.h5 --preset 4 --budget $ABLATION_BUDGET}
gain              model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --gain=values $TUNED
flat              model.activations.*.h5   --preset 4 --bits $ABLATION_FLAT $TUNED
flat-plain        model.activations.*.h5   --preset 4 --bits $ABLATION_FLAT --trellis 0
flat-outliers     model.activations.*.h5   --preset 4 --bits $ABLATION_FLAT --trellis 0 --outliers 0.01
widths-2:4        model.activations.*.h5   --preset 4 --budget $ABLATION_BUDGET --widths 2:4 $TUNED
no-gradients      queries.activations.*.h5 --preset 4 --budget $ABLATION_BUDGET $TUNED
16-samples        model.activations.000.h5 --preset 4 --budget $ABLATION_BUDGET $TUNED
text-labels       text.activations.*.h5    --preset 4 --budget $ABLATION_BUDGET $TUNED
"
