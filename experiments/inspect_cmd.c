/* inspect_cmd.c - lowkey inspect FILE: what is in it. */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>

#include "calib/command.h"
#include "experiments/files.h"

static const char usage[] =
    "usage: lowkey inspect [--json] FILE\n"
    "\n"
    "Show what a file (model, tokens, activations, quantizer) holds: where it comes from, geometry, sizes,\n"
    "number types; of a quantizer, for keys and values of every layer:\n"
    "\n"
    "  bits payload             bits an element costs: code, token scales, outliers as the fit met them\n"
    "  relative error           mean squared error over variance, of the packed tokens\n"
    "  relative weighted error  the same with the weights of the fit\n"
    "  outliers, clamped        share of elements kept exactly; that the outlier rule chose beyond its caps\n"
    "  saturated                residuals, rules or scales at the end of their number format\n"
    "\n"
    "Layers that differ in nothing but their number are one line. lowkey check validates a file.\n"
    "\n"
    "  --json   one object, every layer by itself\n";

int lowkey_inspect_cmd(int argc, char **argv)
{
    static const struct option options[] = { { "help", no_argument, NULL, 'h' },
                                             { "json", no_argument, NULL, 'j' },
                                             { 0 } };
    lowkey_error err;
    json_t *description;
    int json = 0;
    optind = 1;
    for (int option; (option = lowkey_next_option("inspect", argc, argv, options, NULL)) != -1;) {
        if (option == 'h') return fputs(usage, stdout), 0;
        if (option != 'j') return 2;
        json = 1;
    }
    if (optind != argc - 1)
        return lowkey_command_usage("inspect", optind == argc ? "which file?" : "one file at a time");
    if (lowkey_file_describe(argv[optind], &description, &err)) return lowkey_command_failed("inspect", &err);
    if (json)
        json_dumpf(description, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)), putchar('\n');
    else
        lowkey_print_description(description);
    json_decref(description);
    return 0;
}
