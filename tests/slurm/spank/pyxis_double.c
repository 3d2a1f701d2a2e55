/*
 * A test double of the pyxis SPANK plugin (0.24): the same command-line options, no namespaces.
 *
 * Loaded by the real srun, sbatch, slurmstepd and slurmd through plugstack.conf:
 *
 *     required /path/pyxis_double.so record=/path/pyxis.jsonl containers=/path/containers
 *
 * with pyxis' own container_scope=global|job (global is its default), and seconds=S, the time that
 * unpacking and removing a container takes.
 *
 * It appends one JSON line per phase (srun, sbatch, task) with every option's value. A container is
 * a folder <containers>/<node>/<name>: pyxis_<name> stays until somebody removes it, pyxis_<job>_...
 * goes with its job where the scope is `job`, and one without a name goes with its step. A step
 * fails as with pyxis, with the same words. The task itself runs on the host.
 *
 * It is stricter than pyxis where that would do something unforeseen: an image's path must be
 * absolute, a working directory be below a mount, and a mount be left as it is by the shell that
 * reads it.
 *
 * An image may have a file <image>.env beside it, with lines NAME=value: the image's environment,
 * which wins over the job's except for the names in --container-env. Those travel as a line of a
 * file: without a line break, without quotes around the value, and never the node's own paths.
 */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis_double, 1)

enum {
    IMAGE, MOUNTS, WORKDIR, NAME, SAVE, ENV,
    MOUNT_HOME, REMAP_ROOT, ENTRYPOINT, WRITABLE, ENTRYPOINT_LOG,
    SETTINGS
};

static const char *const setting_names[SETTINGS] = {
    "image", "mounts", "workdir", "name", "save", "env",
    "mount_home", "remap_root", "entrypoint", "writable", "entrypoint_log",
};

/* An option's val is its setting, plus this when the option switches the setting off. */
#define OFF 100

static char *values[SETTINGS];
static const char *record_path, *containers;
static int scope_is_job;
static double seconds;

static int is_one_of(const char *word, const char *const *words)
{
    for (; *words != NULL; words++)
        if (strcmp(word, *words) == 0)
            return 1;
    return 0;
}

/* Slurm may deliver the same option twice; only a different second value is a mistake. */
static int take(int val, const char *argument, int remote)
{
    int setting = val % OFF;
    const char *value = argument != NULL ? argument : (val >= OFF ? "no" : "yes");

    (void)remote;
    if (*value == '\0') {
        slurm_error("pyxis: --container-%s: argument required", setting_names[setting]);
        return -1;
    }
    if (values[setting] != NULL && strcmp(values[setting], value) != 0) {
        slurm_error("pyxis: --container-%s given twice: %s and %s", setting_names[setting],
                    values[setting], value);
        return -1;
    }
    if (values[setting] == NULL)
        values[setting] = strdup(value);
    return 0;
}

/*
 * Each entry of --container-mounts is SRC[:DST[:FLAGS]]; SRC is a path, "tmpfs" or "umount".
 * Flags are left to mount.
 */
static int take_mounts(int val, const char *argument, int remote)
{
    char *copy, *rest, *entry;
    int result = 0;

    if (take(val, argument, remote) != 0)
        return -1;
    rest = copy = strdup(argument);
    while (result == 0 && (entry = strsep(&rest, ",")) != NULL) {
        char *fields = entry, *source = strsep(&fields, ":");
        char *target = fields != NULL ? strsep(&fields, ":") : source;
        int special = strcmp(source, "tmpfs") == 0 || strcmp(source, "umount") == 0;

        if (*source == '\0' || *target == '\0') {
            slurm_error("pyxis: --container-mounts: invalid format: %s", argument);
            result = -1;
        } else if ((!special && strspn(source, "./") == 0) || strspn(target, "./") == 0) {
            slurm_error("pyxis: could not add mount entry: %s:%s", source, target);
            result = -1;
        }
    }
    free(copy);
    return result;
}

/* --container-env is NAME[,NAME...]; whether these are names is not asked. */
static int take_env(int val, const char *argument, int remote)
{
    if (take(val, argument, remote) != 0)
        return -1;
    if (*argument == ',' || strstr(argument, ",,") != NULL || argument[strlen(argument) - 1] == ',') {
        slurm_error("pyxis: --container-env: invalid format: %s", argument);
        return -1;
    }
    return 0;
}

/* --container-name is NAME[:auto|create|exec|no_exec]. */
static int take_name(int val, const char *argument, int remote)
{
    const char *flag = strchr(argument, ':');

    if (take(val, argument, remote) != 0)
        return -1;
    if (flag == argument) {
        slurm_error("pyxis: --container-name: empty name");
        return -1;
    }
    if ((flag != NULL && flag[1] != '\0' && strcmp(flag, ":auto") != 0 && strcmp(flag, ":create") != 0 &&
         strcmp(flag, ":exec") != 0 && strcmp(flag, ":no_exec") != 0)) {
        slurm_error("pyxis: --container-name: flag must be \"auto\", \"create\", \"exec\" or "
                    "\"no_exec\"");
        return -1;
    }
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "IMAGE|PATH", "[pyxis double] container image", 1, IMAGE, take},
    {"container-mounts", "SRC:DST[:FLAGS][,...]", "[pyxis double] mounts", 1, MOUNTS, take_mounts},
    {"container-workdir", "PATH", "[pyxis double] working directory", 1, WORKDIR, take},
    {"container-name", "NAME", "[pyxis double] container name", 1, NAME, take_name},
    {"container-save", "PATH", "[pyxis double] save the container", 1, SAVE, take},
    {"container-env", "NAME[,...]", "[pyxis double] names the image may not set", 1, ENV, take_env},
    {"container-mount-home", NULL, "[pyxis double] mount home", 0, MOUNT_HOME, take},
    {"no-container-mount-home", NULL, "[pyxis double] no home", 0, MOUNT_HOME + OFF, take},
    {"container-remap-root", NULL, "[pyxis double] be root", 0, REMAP_ROOT, take},
    {"no-container-remap-root", NULL, "[pyxis double] be oneself", 0, REMAP_ROOT + OFF, take},
    {"container-entrypoint", NULL, "[pyxis double] run the entrypoint", 0, ENTRYPOINT, take},
    {"no-container-entrypoint", NULL, "[pyxis double] no entrypoint", 0, ENTRYPOINT + OFF, take},
    {"container-entrypoint-log", NULL, "[pyxis double] entrypoint log", 0, ENTRYPOINT_LOG, take},
    {"container-writable", NULL, "[pyxis double] writable root", 0, WRITABLE, take},
    {"container-readonly", NULL, "[pyxis double] read-only root", 0, WRITABLE + OFF, take},
    SPANK_OPTIONS_TABLE_END
};

static void read_arguments(int argc, char **argv)
{
    for (int i = 0; i < argc; i++)
        if (strncmp(argv[i], "record=", 7) == 0)
            record_path = strdup(argv[i] + 7);
        else if (strncmp(argv[i], "containers=", 11) == 0)
            containers = strdup(argv[i] + 11);
        else if (strncmp(argv[i], "seconds=", 8) == 0)
            seconds = atof(argv[i] + 8);
        else
            scope_is_job = strcmp(argv[i], "container_scope=job") == 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    spank_context_t context = spank_context();

    read_arguments(argc, argv);
    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return 0;
    for (int i = 0; options[i].name != NULL; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

static void write_json_string(FILE *line, const char *text)
{
    fputc('"', line);
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;

        if (c == '"' || c == '\\')
            fprintf(line, "\\%c", c);
        else if (c < 0x20)
            fprintf(line, "\\u%04x", c);
        else
            fputc(c, line);
    }
    fputc('"', line);
}

/* Appends one line in a single write, so that lines of concurrent tasks never mix. */
static void record(const char *phase, const char *numbers)
{
    char *text = NULL;
    size_t size = 0;
    FILE *line;
    int file;

    if (record_path == NULL || (line = open_memstream(&text, &size)) == NULL)
        return;
    fprintf(line, "{\"phase\": \"%s\"%s", phase, numbers);
    for (int i = 0; i < SETTINGS; i++) {
        fprintf(line, ", \"%s\": ", setting_names[i]);
        if (values[i] == NULL)
            fputs("null", line);
        else
            write_json_string(line, values[i]);
    }
    fputs("}\n", line);
    fclose(line);
    file = open(record_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file >= 0) {
        if (write(file, text, size) != (ssize_t)size)
            slurm_error("pyxis: cannot write %s", record_path);
        close(file);
    }
    free(text);
}

static int used(void)
{
    return values[IMAGE] != NULL || values[NAME] != NULL;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    spank_context_t context = spank_context();

    (void)spank, (void)argc, (void)argv;
    if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR) {
        record(context == S_CTX_LOCAL ? "srun" : "sbatch", "");
        if (!used() && (values[MOUNTS] != NULL || values[WORKDIR] != NULL))
            slurm_error("pyxis: ignoring --container-%s because neither --container-image nor "
                        "--container-name is set", values[MOUNTS] != NULL ? "mounts" : "workdir");
    }
    return 0;
}

/* What pyxis says, line by line; returns -1. */
static int fail(const char *format, ...)
{
    char text[2 * PATH_MAX];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    for (char *rest = text, *line; (line = strsep(&rest, "\n")) != NULL;)
        slurm_error("pyxis: %s", line);
    return -1;
}

static void take_time(void)
{
    struct timespec span = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};

    nanosleep(&span, NULL);
}

/* The names in --container-env keep the job's value. */
static int kept(const char *name)
{
    size_t length = strlen(name);
    const char *at = values[ENV];

    while (at != NULL && *at != '\0') {
        size_t span = strcspn(at, ",");

        if (span == length && strncmp(at, name, length) == 0)
            return 1;
        at += span + (at[span] == ',');
    }
    return 0;
}

/* Lets the named variables travel as a line of enroot's file, and not the node's own paths. */
static void apply_named_variables(spank_t spank)
{
    static const char *const of_the_node[] = {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", NULL};
    char *copy = strdup(values[ENV] != NULL ? values[ENV] : ""), *rest = copy, *name;
    char value[4096];

    while ((name = strsep(&rest, ",")) != NULL && *name != '\0') {
        size_t length;

        if (is_one_of(name, of_the_node)) {
            spank_unsetenv(spank, name);
            continue;
        }
        if (spank_getenv(spank, name, value, sizeof(value)) != ESPANK_SUCCESS)
            continue;
        value[strcspn(value, "\n")] = '\0';
        length = strlen(value);
        if (length > 1 && strchr("\"'", value[0]) != NULL && strchr("\"'", value[length - 1]) != NULL) {
            value[length - 1] = '\0';
            spank_setenv(spank, name, value + 1, 1);
        } else {
            spank_setenv(spank, name, value, 1);
        }
    }
    free(copy);
}

static void apply_image_environment(spank_t spank, const char *image)
{
    char path[PATH_MAX], line[4096];
    FILE *file;

    snprintf(path, sizeof(path), "%s.env", image);
    if ((file = fopen(path, "r")) == NULL)
        return;
    while (fgets(line, sizeof(line), file) != NULL) {
        char *value = strchr(line, '=');

        line[strcspn(line, "\n")] = '\0';
        if (value == NULL)
            continue;
        *value++ = '\0';
        if (!kept(line))
            spank_setenv(spank, line, value, 1);
    }
    fclose(file);
}

/* The folder that stands for this step's container on this node. */
static void container_path(spank_t spank, char *path, size_t size)
{
    uint32_t job = 0, step = 0;
    char node[256] = "", job_part[16] = "", name[256];

    spank_get_item(spank, S_JOB_ID, &job);
    spank_get_item(spank, S_JOB_STEPID, &step);
    spank_getenv(spank, "SLURMD_NODENAME", node, sizeof(node));
    if (scope_is_job)
        snprintf(job_part, sizeof(job_part), "%u_", job);
    if (values[NAME] != NULL)
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(values[NAME], ":"), values[NAME]);
    else
        snprintf(name, sizeof(name), "%u.%u", job, step);
    snprintf(path, size, "%s/%s/pyxis_%s%s", containers, node, job_part, name);
}

/* enroot import and enroot create. */
static int unpack(const char *path)
{
    struct stat status;
    char magic[4];
    const char *image = values[IMAGE];
    int file, valid = 0;

    if (strspn(image, "./") == 0) {
        const char *name = strncmp(image, "docker://", 9) == 0 ? image + 9 : image;
        const char *upper = strpbrk(strchr(name, '#') != NULL ? strchr(name, '#') : name,
                                    "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
        const char *why = upper != NULL ? "[ERROR] Invalid image reference: docker://"
                                        : "curl: (6) Could not resolve the host of ";

        return fail("failed to import docker image: %s\nprinting enroot log file:\n    %s%s", image,
                    why, name);
    }
    if ((file = open(image, O_RDONLY | O_CLOEXEC)) >= 0) {
        valid = read(file, magic, sizeof(magic)) == sizeof(magic) && memcmp(magic, "hsqs", 4) == 0;
        close(file);
    }
    if (!valid || *image != '/')
        return fail("failed to create container filesystem for image: %s\n"
                    "printing enroot log file:\n    [ERROR] %s: %s", image,
                    stat(image, &status) != 0 ? "No such file or directory" : "Invalid image format",
                    image);
    take_time();
    return mkdir(path, 0700);
}

/* The container of this step on this node, made by the first of its tasks. */
static int find_container(spank_t spank)
{
    char path[PATH_MAX], folder[PATH_MAX];
    int lock, result = 0;

    container_path(spank, path, sizeof(path));
    snprintf(folder, sizeof(folder), "%.*s", (int)(strrchr(path, '/') - path), path);
    mkdir(containers, 0700);
    mkdir(folder, 0700);
    lock = open(folder, O_RDONLY | O_CLOEXEC);
    flock(lock, LOCK_EX);
    if (access(path, F_OK) != 0) {
        if (values[IMAGE] == NULL)
            result = fail("error: a container with name \"%s\" does not exist, and "
                          "--container-image is not set", strrchr(path, '/') + 1);
        else
            result = unpack(path);
    } else if (values[NAME] != NULL && strstr(values[NAME], ":create") != NULL) {
        result = fail("error: \"create\" flag was passed to --container-name but the container "
                      "already exists");
    }
    close(lock);
    return result;
}

/* The log of enroot create, which pyxis prints when the start fails. */
static const char *const unpacked_log =
    "couldn't create enroot start configuration script\n"
    "printing enroot log file:\n"
    "    [INFO] Extracting squashfs filesystem...\n"
    "    Parallel unsquashfs: Using 64 processors\n"
    "    11003 inodes (12345 blocks) to write\n"
    "    created 9843 files\n"
    "    created 1203 directories\n"
    "    created 1160 symlinks\n"
    "    created 0 devices\n"
    "    created 0 fifos\n"
    "    created 0 sockets\n"
    "    created 0 hardlinks\n"
    "container was not started successfully by another task";

static int check_mounts(void)
{
    char *copy, *rest, *entry;
    int result = 0;

    if (values[MOUNTS] == NULL)
        return 0;
    if (strpbrk(values[MOUNTS], "\"$`\\") != NULL)
        return fail("a shell would not leave mounts as they are: %s", values[MOUNTS]);
    rest = copy = strdup(values[MOUNTS]);
    while (result == 0 && (entry = strsep(&rest, ",")) != NULL) {
        char *source = strsep(&entry, ":");

        if (*source == '/' && access(source, F_OK) != 0)
            result = fail("--container-mounts: source path does not exist: %s\n%s", source,
                          unpacked_log);
    }
    free(copy);
    return result;
}

/* Whether a folder is the root or below the target of a mount: others are the image's. */
static int is_mounted(const char *folder)
{
    char *copy = strdup(values[MOUNTS] != NULL ? values[MOUNTS] : ""), *rest = copy, *entry;
    int found = strcmp(folder, "/") == 0;

    while (!found && (entry = strsep(&rest, ",")) != NULL) {
        char *source = strsep(&entry, ":");
        char *target = entry != NULL ? strsep(&entry, ":") : source;
        size_t length = strlen(target);

        found = length > 0 && strncmp(folder, target, length) == 0 &&
                (folder[length] == '/' || folder[length] == '\0' || target[length - 1] == '/');
    }
    free(copy);
    return found;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    uint32_t job = 0, step = 0, node = 0, rank = 0;
    char numbers[160];

    (void)argc, (void)argv;
    if (!used())
        return 0;
    spank_get_item(spank, S_JOB_ID, &job);
    spank_get_item(spank, S_JOB_STEPID, &step);
    spank_get_item(spank, S_JOB_NODEID, &node);
    spank_get_item(spank, S_TASK_GLOBAL_ID, &rank);
    snprintf(numbers, sizeof(numbers), ", \"job\": %u, \"step\": %u, \"node\": %u, \"rank\": %u",
             job, step, node, rank);
    record("task", numbers);
    if (find_container(spank) != 0 || check_mounts() != 0)
        return -1;
    if (values[WORKDIR] != NULL && !is_mounted(values[WORKDIR]))
        return fail("couldn't chdir to %s: No such file or directory", values[WORKDIR]);
    if (values[WORKDIR] != NULL && chdir(values[WORKDIR]) != 0)
        return fail("couldn't chdir to %s: %s", values[WORKDIR], strerror(errno));
    apply_named_variables(spank);
    if (values[IMAGE] != NULL)
        apply_image_environment(spank, values[IMAGE]);
    return 0;
}

/* The last task of a step on a node takes a container without a name with it. */
int slurm_spank_task_exit(spank_t spank, int argc, char **argv)
{
    static uint32_t ended;
    uint32_t tasks = 0;
    char path[PATH_MAX];

    (void)argc, (void)argv;
    spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks);
    if (values[IMAGE] == NULL || values[NAME] != NULL || ++ended != tasks)
        return 0;
    container_path(spank, path, sizeof(path));
    take_time();
    rmdir(path);
    return 0;
}

/* On each of the job's nodes; other nodes' containers of an ended job may go as well. */
int slurm_spank_job_epilog(spank_t spank, int argc, char **argv)
{
    uint32_t job = 0;
    char pattern[PATH_MAX];
    glob_t found;

    read_arguments(argc, argv);
    if (!scope_is_job || spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS)
        return 0;
    snprintf(pattern, sizeof(pattern), "%s/*/pyxis_%u_*", containers, job);
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++)
            rmdir(found.gl_pathv[i]);
        globfree(&found);
    }
    return 0;
}
