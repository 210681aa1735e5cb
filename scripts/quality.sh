#!/bin/sh
# What formats cost in loss and KL: captures, fits, evaluations, tables, plots; scripts/quality_lists.sh says of what.
#   quality.sh captures | fit    those of the main table
#   quality.sh short             the main table: WikiText-2 test, 32 windows, every format
#   quality.sh full              all windows of it: KVQuant's recipes and ours
#   quality.sh texts             other texts, other calibration, a second model
#   quality.sh ablation          parts of our recipe left out, on valid windows that nothing is fitted on
#   quality.sh report            plots and tables of the results that are there
# Everything goes into build/quality, figures then into experiments/results. What is there is kept and a run that was stopped
# goes on: after a change of the recipe, remove its quantizers and its rows in the journal (eval refuses rows of another file).
# LOWKEY=command, instead of build/lowkey; DIRTY=1: a build of uncommitted changes will do.
# shellcheck disable=SC2046,SC2086 # lists are meant to be split into words
set -eu
cd "$(dirname "$0")/.."
: "${LOWKEY:=build/lowkey}" "${QUALITY:=build/quality}" "${RESULTS:=experiments/results}" "${MODELS:=build/model}"
python=build/venv/bin/python
. scripts/quality_lists.sh

fail() { echo "quality.sh: $*" >&2 && exit 1; }

# ---- steps ----

# Rows say which commit made them; the command is copied, so that a later make does not change it under a long run.
choose_command() {
    commit=$("$LOWKEY" --version | cut -d ' ' -f 3)
    case $commit in
    *-dirty | unknown | '')
        [ "${DIRTY:-0}" = 1 ] || fail "$LOWKEY is of commit '$commit', which nobody can build again: commit and make, or DIRTY=1"
        ;;
    esac
    mkdir -p "$QUALITY" "$RESULTS"
    lowkey=$QUALITY/lowkey-$commit
    cmp -s "$LOWKEY" "$lowkey" || { cp "$LOWKEY" "$lowkey.new" && mv "$lowkey.new" "$lowkey"; }
}

timed() { # timed NAME COMMAND...: its time and memory, and the command itself, are noted in commands.csv
    echo "$*" >&2
    $python experiments/timed.py "$QUALITY/commands.csv" "$commit" "$@"
}

use_model() { # use_model MODEL
    of=$1 length=$LENGTH times=1
    case $1 in
    smollm2) model=$MODELS/smollm2-135m.model.h5 tokens=$MODELS/ ;;
    gemma3) model=$MODELS/gemma3-270m.model.h5 tokens=$MODELS/gemma3. length=$((LENGTH / 2)) times=2 ;;
    *) fail "no model '$1'" ;;
    esac
}

# The text that is calibrated on. A mixture has equal shares in a number of samples that 3 divides.
use_domain() { # use_domain DOMAIN
    domain=$1 folder=$QUALITY/$of.$1
    case $1 in
    wiki) fit_tokens=${tokens}wiki.valid.tokens.h5 share=1 ;;
    mixture) fit_tokens=${tokens}mixture.fit.tokens.h5 share=3 ;;
    *) fail "no text '$1' to calibrate on" ;;
    esac
    mkdir -p "$folder"
}

capture() { # capture NAME...: of the list, where its last file is not there
    echo "$captures" | while read -r name n options; do
        case " $* " in *" $name "*) ;; *) continue ;; esac
        n=$((n * times / share * share))
        last=$(printf %03d $(((n - 1) / PER_FILE)))
        [ -e "$folder/$name.activations.$last.h5" ] && continue
        timed "capture $of $domain $name" "$lowkey" capture --model "$model" --tokens "$fit_tokens" --length "$length" \
            --samples "$n" $options --per-file "$PER_FILE" --out "$folder/$name.activations.h5"
    done
}

fit() { # fit FOLDER < lines of NAME CAPTURES OPTIONS: those that are not there yet, and captures for them
    while read -r name on options; do
        if [ -z "$name" ] || [ -e "$1/$name.quantizer.h5" ]; then continue; fi
        capture "${on%%.*}"
        case $options in
        *' then '*) tune=${options#* then } options=${options%% then *} out=$1/$name.untuned.h5 ;;
        *) tune='' out=$1/$name.quantizer.h5 ;;
        esac
        [ -e "$out" ] || timed "fit $of $domain $name" "$lowkey" fit $options --out "$out" "$folder"/$on >"$1/$name.fit.txt"
        [ -z "$tune" ] || timed "tune $of $domain $name" "$lowkey" tune --model "$model" --tokens "$fit_tokens" $tune --quantizer "$out" \
            --checkpoint "$1/$name.checkpoint" --out "$1/$name.quantizer.h5" >"$1/$name.tune.txt"
    done
}

evaluate() { # evaluate TEXT JOURNAL SUMMARY OPTION... FORMAT...
    text=$1 journal=$QUALITY/$2.csv name=$3 summary=$QUALITY/$3.summary.csv
    shift 3
    capture text
    for file in "$folder"/text.activations.*.h5; do set -- --activations "$file" "$@"; done
    timed "eval $name" "$lowkey" eval --model "$model" --tokens "$tokens$text.tokens.h5" --window "$length" \
        --references "$QUALITY/references" --csv "$journal" --summary "$summary" "$@" >"$QUALITY/$name.txt"
}

# Rows of formats that come from no file stand for any machine: what is committed is not measured again.
resume() { # resume JOURNAL RESULTS
    if [ -e "$1" ] || [ ! -e "$2" ]; then return; fi
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "file_sha256") column = i } NR == 1 || $column == ""' "$2" >"$1.new"
    mv "$1.new" "$1"
}

quantizers() { # the files of fits() for the main table
    fits | sed "s|^\([^ ]*\) .*|$folder/\1.quantizer.h5|"
}

merge() { # merge FILE...: rows of several CSV files under one header
    awk 'FNR > 1 || NR == 1' "$@"
}

# ---- what can be asked for ----

main_fits() {
    use_model smollm2
    use_domain wiki
    fits | fit "$folder"
}

short() {
    main_fits
    [ "$PEERS" != all ] || PEERS=$("$lowkey" eval --list)
    resume "$QUALITY/smollm2.wiki.test.csv" "$RESULTS/quality_windows.csv"
    evaluate wiki.test smollm2.wiki.test smollm2.wiki.test --spread "$SPREAD" f16 bf16 $(quantizers) $PEERS
    cp "$QUALITY/smollm2.wiki.test.summary.csv" "$RESULTS/quality.csv"
    cp "$QUALITY/smollm2.wiki.test.csv" "$RESULTS/quality_windows.csv"
}

full() {
    main_fits
    resume "$QUALITY/smollm2.wiki.test.csv" "$RESULTS/quality_windows.csv"
    evaluate wiki.test smollm2.wiki.test smollm2.wiki.test.full f16 $(quantizers)
    cp "$QUALITY/smollm2.wiki.test.full.summary.csv" "$RESULTS/quality_full.csv"
    cp "$QUALITY/smollm2.wiki.test.csv" "$RESULTS/quality_windows.csv"
}

# Formats that are calibrated on something else than WikiText-2 are called NAME@that.
text() { # text MODEL TEXT DOMAIN OPTION...
    use_model "$1"
    use_domain "$3"
    text=$2 formats='' at=''
    if [ "$3" = wiki ]; then formats="f16 $TEXT_PEERS"; else at=@$3; fi
    shift 3
    for name in $TEXT_FITS; do
        fits | grep "^$name " | fit "$folder"
        formats="$formats $name$at=$folder/$name.quantizer.h5"
    done
    for name in $TEXT_CALIBRATED_PEERS; do formats="$formats $name$at=$name"; done
    evaluate "$text" "$of.$text" "$of.$text.$domain" "$@" $formats
    summaries="$summaries $summary"
    [ "$of.$text" = smollm2.wiki.test ] || journals="$journals $journal" # that is the main table's
}

texts() {
    summaries='' journals=''
    while read -r line; do
        [ -z "$line" ] || text $line
    done <<EOF_TEXTS
$TEXTS
EOF_TEXTS
    merge $summaries >"$RESULTS/quality_texts.csv"
    merge $(printf '%s\n' $journals | sort -u) >"$RESULTS/quality_texts_windows.csv"
    cp "$QUALITY/smollm2.wiki.test.csv" "$RESULTS/quality_windows.csv"
}

ablation() {
    use_model smollm2
    use_domain wiki
    parts=$folder/ablation-$ABLATION_BUDGET
    mkdir -p "$parts"
    echo "$ablations" | fit "$parts"
    set -- $VALID
    for name in $(echo "$ablations" | cut -d ' ' -f 1); do
        [ ! -e "$parts/$name.quantizer.h5" ] || set -- "$@" "$parts/$name.quantizer.h5"
    done
    evaluate wiki.valid "ablation-$ABLATION_BUDGET" "ablation-$ABLATION_BUDGET" "$@"
    cp "$QUALITY/ablation-$ABLATION_BUDGET.summary.csv" "$RESULTS/quality_ablation.csv"
    cp "$QUALITY/ablation-$ABLATION_BUDGET.csv" "$RESULTS/quality_ablation_windows.csv"
}

report() {
    [ ! -e "$QUALITY/commands.csv" ] || cp "$QUALITY/commands.csv" "$RESULTS/quality_commands.csv"
    [ ! -e "$RESULTS/quality.csv" ] || $python experiments/plot_quality.py "$RESULTS/quality.csv" "$RESULTS/quality"
    $python experiments/quality_table.py "$RESULTS" >"$RESULTS/quality.md.new"
    mv "$RESULTS/quality.md.new" "$RESULTS/quality.md"
}

case ${1:-} in
captures)
    choose_command
    use_model smollm2
    use_domain wiki
    capture text model
    ;;
fit) choose_command && main_fits ;;
short | full | texts | ablation)
    choose_command
    "$1"
    report
    ;;
report) report ;;
*) fail "captures, fit, short, full, texts, ablation or report?" ;;
esac
