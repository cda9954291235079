/* What the library shows to its users. Everything else is hidden in a shared build. */
#ifndef RECSDK_EXPORT_H
#define RECSDK_EXPORT_H

#define RECSDK_API __attribute__((visibility("default")))

#endif
