/* commands.h - the subcommands that live in experiments: argv[0] is the name, the exit status comes back. */
#ifndef LOWKEY_COMMANDS_H
#define LOWKEY_COMMANDS_H

int lowkey_capture_cmd(int argc, char **argv);
int lowkey_eval_cmd(int argc, char **argv);
int lowkey_error_cmd(int argc, char **argv);
int lowkey_cost_cmd(int argc, char **argv);
int lowkey_tune_cmd(int argc, char **argv);

const char *lowkey_commit(void); /* of the command: "6527a35", "6527a35-dirty", "unknown" outside a repository */

#endif
