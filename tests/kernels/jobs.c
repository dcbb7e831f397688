// SPDX-License-Identifier: GPL-2.0
/* A stand-in for a GPU's driver, below the kernel's own GPU scheduler: a GPU that takes time and computes nothing.
 *
 * A process opens /dev/jobs and writes a number of microseconds, a u32: a job that takes as long. The GPU executes one job at a
 * time, in the order in which the scheduler gives them to it. The call returns when the scheduler says that the job is done. Of a
 * job of 0 us the driver never says that it has ended, as xe does not of those of long-running queues.
 */
#include <linux/module.h>
#include <linux/miscdevice.h>
#include <linux/fs.h>
#include <linux/slab.h>
#include <linux/delay.h>
#include <linux/uaccess.h>
#include <drm/gpu_scheduler.h>

struct opened {
	struct drm_sched_entity entity;
};

struct job {
	struct drm_sched_job base;
	struct dma_fence *done;
	struct delayed_work work;
	u32 us;
};

static struct drm_gpu_scheduler scheduler;
static struct workqueue_struct *gpu;
static DEFINE_SPINLOCK(fence_lock);
static u64 context;
static atomic64_t seqno;

static const char *name_of(struct dma_fence *fence)
{
	return "jobs";
}

static const struct dma_fence_ops fence_ops = { .get_driver_name = name_of, .get_timeline_name = name_of };

static void execute(struct work_struct *work)
{
	struct job *job = container_of(work, struct job, work.work);
	struct dma_fence *done = job->done;

	usleep_range(job->us, job->us + 50);
	dma_fence_signal(done);
	dma_fence_put(done);
}

static struct dma_fence *run(struct drm_sched_job *base)
{
	struct job *job = container_of(base, struct job, base);

	if (!job->us)
		return NULL;
	job->done = kzalloc(sizeof(*job->done), GFP_KERNEL);
	if (!job->done)
		return ERR_PTR(-ENOMEM);
	dma_fence_init(job->done, &fence_ops, &fence_lock, context, atomic64_inc_return(&seqno));
	dma_fence_get(job->done);
	queue_delayed_work(gpu, &job->work, 0);
	return job->done;
}

static enum drm_gpu_sched_stat timed_out(struct drm_sched_job *base)
{
	return DRM_GPU_SCHED_STAT_ENODEV;
}

static void release_job(struct drm_sched_job *base)
{
	struct job *job = container_of(base, struct job, base);

	flush_delayed_work(&job->work);
	drm_sched_job_cleanup(base);
	kfree(job);
}

static const struct drm_sched_backend_ops ops = { .run_job = run, .timedout_job = timed_out, .free_job = release_job };

static int on_open(struct inode *inode, struct file *file)
{
	struct drm_gpu_scheduler *list = &scheduler;
	struct opened *opened = kzalloc(sizeof(*opened), GFP_KERNEL);

	if (!opened)
		return -ENOMEM;
	file->private_data = opened;
	return drm_sched_entity_init(&opened->entity, DRM_SCHED_PRIORITY_NORMAL, &list, 1, NULL);
}

static ssize_t on_write(struct file *file, const char __user *from, size_t size, loff_t *at)
{
	struct opened *opened = file->private_data;
	struct dma_fence *finished;
	struct job *job;
	u32 us;

	if (size != sizeof(us) || copy_from_user(&us, from, sizeof(us)))
		return -EINVAL;
	job = kzalloc(sizeof(*job), GFP_KERNEL);
	if (!job)
		return -ENOMEM;
	job->us = us;
	INIT_DELAYED_WORK(&job->work, execute);
	if (drm_sched_job_init(&job->base, &opened->entity, 1, NULL, 7)) {
		kfree(job);
		return -ENOMEM;
	}
	drm_sched_job_arm(&job->base);
	finished = dma_fence_get(&job->base.s_fence->finished);
	drm_sched_entity_push_job(&job->base);
	dma_fence_wait(finished, false);
	dma_fence_put(finished);
	return size;
}

static int on_release(struct inode *inode, struct file *file)
{
	struct opened *opened = file->private_data;

	drm_sched_entity_destroy(&opened->entity);
	kfree(opened);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE, .open = on_open, .write = on_write, .release = on_release,
};

static struct miscdevice device = { .minor = MISC_DYNAMIC_MINOR, .name = "jobs", .fops = &operations };

static int __init start(void)
{
	struct drm_sched_init_args args = {
		.ops = &ops, .num_rqs = DRM_SCHED_PRIORITY_COUNT, .credit_limit = 4, .timeout = MAX_SCHEDULE_TIMEOUT, .name = "ccs0",
	};
	int error = misc_register(&device);

	if (error)
		return error;
	args.dev = device.this_device;
	context = dma_fence_context_alloc(1);
	gpu = alloc_ordered_workqueue("jobs", 0);
	return drm_sched_init(&scheduler, &args);
}

module_init(start);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A stand-in for a GPU's driver");
