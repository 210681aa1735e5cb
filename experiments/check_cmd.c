/* check_cmd.c - lowkey check FILE...: is each of them what formats/README.md says? */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/files.h"

static const char usage[] =
    "usage: lowkey check [--json] FILE...\n"
    "\n"
    "Read every file (model, tokens, activations, quantizer) whole and hold it against its schema. One line for each: what it\n"
    "holds, or on standard error what is wrong with it. Exit status 1 where anything is.\n"
    "\n"
    "  --json   an array of {file, good, message} on standard output\n";

json_t *lowkey_json_text(const char *text)
{
    json_t *string = json_string(text);
    char *ascii = string ? NULL : strdup(text);
    for (char *c = ascii; c && *c; c++)
        if (*c & 0x80) *c = '?';
    if (ascii) string = json_string(ascii);
    free(ascii);
    return string;
}

static int check_file(const char *path, json_t *results)
{
    lowkey_error err = { 0 };
    char summary[LOWKEY_SUMMARY_SIZE] = "";
    const int good = lowkey_file_check(path, summary, &err) == LOWKEY_OK;
    if (!good) lowkey_command_failed("check", &err);
    else if (!results) printf("%s: good: %s\n", path, summary);
    if (results)
        json_array_append_new(results, json_pack("{s:o, s:b, s:o}", "file", lowkey_json_text(path), "good", good, "message",
                                                 lowkey_json_text(good ? summary : err.message)));
    return !good;
}

int lowkey_check_cmd(int argc, char **argv)
{
    static const struct option options[] = { { "help", no_argument, NULL, 'h' }, { "json", no_argument, NULL, 'j' }, { 0 } };
    json_t *results = NULL;
    int failed = 0;
    optind = 1;
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        if (option == 'h') return fputs(usage, stdout), 0;
        if (option != 'j') return lowkey_command_usage("check", "unknown option '%s'", argv[optind - 1]);
        if (!results) results = json_array();
    }
    if (optind == argc) return lowkey_command_usage("check", "which file?");
    lowkey_catch_interrupts();
    for (int i = optind; i < argc && !lowkey_interrupted(); i++) failed |= check_file(argv[i], results);
    failed |= lowkey_interrupted();
    if (results) {
        json_dumpf(results, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(results);
    }
    return failed;
}
