/// Exported torch models that read frozen tables, in programs without Python:
/// librecsdk_serving_torch.
///
/// Loading the library registers the operators recsdk::serving_lookup and recsdk::serving_pool with
/// the torch of the process, 2.10 or later; a package of AOTInductor then runs as it does beside
/// Python. A table that a package names is opened at the path from which it was exported, once a
/// process, when it is first read, and serves what is there then. The others that were frozen with
/// it are opened at that time, so that a package reads one freeze; one that cannot be opened makes
/// only those calls fail that read it. Tables stay open until recsdk_serving_torch_close: an
/// operator is not told which package runs it, nor when that goes.
///
/// Thread safety: any function, and any operator, may be called from any thread. Who opens tables
/// holds up only those who ask for others of the same freeze.
#ifndef RECSDK_SERVING_TORCH_H
#define RECSDK_SERVING_TORCH_H

#include "recsdk/export.h"
#include "recsdk/serving/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Has the operators read `table` where a package names table `name` of the frozen checkpoint at
/// `path`, an absolute path: for files that lie elsewhere now, and for tables to which the program
/// gives deltas. The table is the caller's, and must stay open until this is called with another
/// table or null, and calls that run are done. Null: the operators open the path again. Shards that
/// were chosen in the export are not told apart.
RECSDK_API int recsdk_serving_torch_use(const char* path, const char* name,
                                        const recsdk_serving_table* table);

/// Closes what operators have opened at `path`, an absolute path, for packages that run no more or
/// are to read what is there now: those that run again open it anew. Calls that run meanwhile end
/// as they began; let no request run across it, which could read two freezes. Tables that the
/// program gave stay its own, and given. Nothing open there: nothing happens.
RECSDK_API int recsdk_serving_torch_close(const char* path);

#ifdef __cplusplus
}
#endif

#endif
